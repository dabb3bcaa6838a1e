"""What is decided on one document: language, rules, evaluation sets, personal data, quality; `steps.filters_of` has the order."""
