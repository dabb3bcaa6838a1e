"""Quality rules: basic rules and published rule sets. See docs/how-to/rules.md.

`apply.apply` applies all rules of a recipe, and `lists.judge_url` the URL rules. To add a rule, add it and its limit to
recipe/rule_sets.toml.
"""
