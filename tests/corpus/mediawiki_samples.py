"""Pages and dumps of a wiki."""

from __future__ import annotations

from tests.corpus.corpus_samples import prose

HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" xml:lang="en">\n<siteinfo/>\n'


def page(number: int, text: str | None = None, namespace: int = 0, more: str = "") -> str:
    words = text if text is not None else prose(number, 40)
    return (
        f"  <page>\n    <title>Title {number}</title>\n    <ns>{namespace}</ns>\n    <id>{number}</id>\n{more}"
        f"    <revision>\n      <id>9{number}</id>\n      <timestamp>2024-01-01T00:00:00Z</timestamp>\n"
        f'      <contributor><id>5</id></contributor>\n      <model>wikitext</model>\n      <text xml:space="preserve">'
        f"{words}</text>\n    </revision>\n  </page>\n"
    )


def dump(*pages: str) -> bytes:
    return (HEAD + "".join(pages) + "</mediawiki>\n").encode()
