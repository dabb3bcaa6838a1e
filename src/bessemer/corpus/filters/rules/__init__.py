"""Quality rules: the basic rules, and published rule sets by choice; see docs/how-to/rules.md.

`apply.apply` applies all rules of a recipe, `lists.judge_url` the URL rules. To add a rule, add it and its limit to
recipe/rule_sets.toml.
"""
