"""The record that flows through the corpus stage: its identity, its columns, and why it can be rejected."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from bessemer.corpus.rules.table import RULE_REASONS

# Columns of documents/part-*.parquet, all strings; sorted by (source, identity). A document without a label has "", one
# whose language was not looked for as well. `path` is the file in the corpus; `place` where the document stands in it:
# "" for a whole file, else its key (a byte offset, a row group and row, a record's name).
COLUMNS = ("identity", "text", "source", "path", "place", "language", "metadata", "label")
# Columns of rejected/part-*.parquet, all strings; sorted by (source, identity). `excerpt` and `text` are "" where
# corpus.keep_rejected leaves them out.
REJECTED_COLUMNS = ("identity", "source", "path", "place", "language", "reason", "detail", "excerpt", "text")
# Every reason for which a document can be rejected, in the order in which they are looked for. A document has one.
REASONS = {
    "unreadable": "the file could not be opened or read",
    "wrong_format": "the file is not of its source's format",
    "no_text_key": "the record or file has no field or column corpus.sources.text_key",
    "no_label": "the record or file has no class in corpus.sources.label_key",
    "not_utf8": "the bytes are not UTF-8; corpus.sources.encoding names what else they are",
    "bad_record": "the record is damaged or has no text",
    "binary": "NUL bytes: no text",
    "http_status": "a page of a crawl that the server did not answer with 200",
    "not_html": "a record of a crawl that is no HTML page",
    "not_article": "a page of a wiki outside its article namespace, or not of wikitext",
    "redirect": "a page of a wiki that only leads to another",
    "empty": "no text is left after extraction",
    "too_short": "fewer characters than corpus.rules.min_characters",
    "too_long": "more characters than corpus.rules.max_characters",
    "long_lines": "minified code or data, or a mean line longer than corpus.rules.max_mean_line_length",
    "not_text": "too few letters and digits, or no text a person wrote",
    "repetitive": "too few distinct lines",
    "language_unsure": "its language scores below corpus.language.min_score",
    "language_other": "its language is not one of corpus.language.allowed",
    "language_switches": "it changes language more often than corpus.language.max_switches",
    **RULE_REASONS,
    "contaminated": "it holds text of an evaluation set of corpus.contamination.sets",
    "step_failed": "a step of the cleaning failed on it, which is a fault of the step",
    "low_quality": "the quality classifier scores it too low (corpus.quality)",
    "exact_duplicate": "the same text is in the corpus already",
    "near_duplicate": "nearly the same text is in the corpus already",
    "only_repeats": "too little is left without repeated paragraphs and spans",
}
# what to do where nothing is left of a source and most of it was lost for a reason; for others: see corpus.rules
ADVICE = {
    "unreadable": "check that the files are there and may be read",
    "wrong_format": "give files of text, or name their format (corpus.sources.{source}.format)",
    "no_text_key": "name the field that holds the text: --set corpus.sources.{source}.text_key=NAME",
    "no_label": "name the field that holds the class: --set corpus.sources.{source}.label_key=NAME",
    "not_utf8": "name their encoding: --set corpus.sources.{source}.encoding=cp1252 (or cp850, iso8859-2, koi8-r, ...)",
    "bad_record": "mend the files: records are objects whose corpus.sources.{source}.text_key is a string",
    "empty": "give files that hold text",
    "too_short": "keep shorter ones: --set corpus.rules.min_characters=1",
    "too_long": "cut the files into documents, e.g. split -C 500k --additional-suffix=.txt FILE FOLDER/part-; or keep longer "
    "ones, at 100 bytes of memory a character: --set corpus.rules.max_characters=1_000_000_000",
    "long_lines": "keep long lines: --set corpus.rules.max_mean_line_length=1e9",
    "not_text": "keep them: --set corpus.rules.min_alphanumeric_share=0",
    "repetitive": "keep them: --set corpus.rules.min_unique_line_share=0",
    **dict.fromkeys(("language_unsure", "language_other", "language_switches"), "see corpus.language"),
    "contaminated": "see corpus.contamination",
    "step_failed": "please report it",
    "low_quality": "see corpus.quality",
    **dict.fromkeys(("exact_duplicate", "near_duplicate", "only_repeats"), "see corpus.dedup"),
}
EXCERPT_CHARACTERS = 300  # characters of a rejected document that are kept for the report


@dataclass(slots=True)
class Record:
    """What a reader found in one place of a file: text, or the reason why there is none."""

    key: str  # the place within the file: "" for a whole file, else a record number, a byte offset or a name
    num_bytes: int  # bytes of the input that this record took
    text: str = ""
    reason: str | None = None
    detail: str = ""
    metadata: dict[str, object] = field(default_factory=dict)
    label: str = ""  # the class a person gave it; "" for none
    source: str = ""
    format: str = ""  # of the file that it was read from
    language: str = ""  # ISO 639 code, where a step looked for it

    def reject(self, reason: str, detail: str = "") -> None:
        """Give it the one reason for which it is not kept; the steps after this one do not see it."""
        self.reason, self.detail = reason, detail


def identity(source: str, path: str, key: str) -> str:
    """128 bits in hexadecimal, from where the document stands: independent of run, order, machine and
    content."""
    place = "\0".join((source, path, key)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(place, digest_size=16).hexdigest()


def printable(text: str) -> str:
    """Text that UTF-8 can hold: halves of surrogate pairs become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
