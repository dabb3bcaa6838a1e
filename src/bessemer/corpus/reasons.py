"""Every reason for which a document can be rejected: its meaning, and how to keep what a source loses for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from bessemer.corpus.filters.rules.table import RULE_KEYS, RULE_REASONS

_TABLE = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8"))
REASONS: dict[str, str] = {}  # in the order in which they are looked for
for _name, _entry in _TABLE.items():
    REASONS |= RULE_REASONS | _entry if _name == "rules" else {_name: _entry["meaning"]}
ADVICE: dict[str, str] = {name: entry["advice"] for name, entry in _TABLE.items() if "advice" in entry} | RULE_KEYS
