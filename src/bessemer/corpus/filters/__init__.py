"""What is decided on one document: language, rules, evaluation sets, personal data, quality; `chain.STEPS` has the order."""
