"""Wikitext: what a reader sees stays, by lines; marks, boxes and tables go; nothing takes more than linear time."""

import contextlib

import pytest

from bessemer.corpus.extract import NotText
from bessemer.corpus.mediawiki import plain_text
from tests.costs import no_quadratic_pass


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("'''Bold''' and ''italic'' and '''''both'''''.", "Bold and italic and both."),
        ("A [[link]], a [[target|label]], [[Rome]]s.", "A link, a label, Romes."),
        ("See [http://a.example/x the site] and [https://b.example].", "See the site and ."),
        ("Text.<ref>Note {{cite|a=1}}</ref> More.<ref name=x /> End.", "Text. More. End."),
        ("A{{box|x={{inner|[[y]]}}|z}}B", "AB"),
        ("{{lang|fr|mot juste}} and {{nowrap|1 2}} and {{convert|5|km|mi}}", "mot juste and 1 2 and 5 km"),
        ("Before\n{| class=x\n! a\n|-\n| b || [[c]]\n{|\n| inner\n|}\n|}\nAfter", "Before\n\nAfter"),
        ("[[File:A.jpg|thumb|A [[cat]] sits]]Text[[Category:Cats]][[de:Katze]]", "Text"),
        ("[[:Category:Cats]]", "Category:Cats"),
        ("a<!-- hidden [[ {{ -->b", "ab"),
        ("x<br>y<br/>z", "x\ny\nz"),
        ("&lt;p&gt; &amp; caf&eacute;&nbsp;x", "<p> & café x"),
        ("<nowiki>[[not a link]]</nowiki>", "[[not a link]]"),
        ("__NOTOC__\nText", "Text"),
        ("He (born {{birth|1950}}) sang.", "He (born ) sang."),
        ("He ({{lang-x}}; ) sang.", "He sang."),
        ("* a\n* b\n** c\n# d\n: e", "- a\n- b\n  - c\n- d\ne"),
        ("Text\n== Empty ==\n{{box}}\n== Full ==\nMore\n=== Sub ===\n== Last ==\n", "Text\n\nFull\n\nMore"),
        ("== A ==\n=== B ===\nText", "A\n\nB\n\nText"),
        ("a [x] b", "a [x] b"),
        ("unclosed [[link and text", "unclosed [[link and text"),
        ("stray ]] and }} and |} stay out", "stray ]] and and stay out"),
        ("a | b", "a | b"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_a_reader_sees(source: str, shown: str) -> None:
    assert plain_text(source) == shown


def test_code_keeps_its_lines() -> None:
    code = "def f(x):\n    if x:\n        return  [[1]]\n\n    # * no list\n== no heading =="
    text = plain_text(f"Before\n<syntaxhighlight lang=python>\n{code}\n</syntaxhighlight>\n''After''")
    assert text == f"Before\n\n{code}\n\nAfter"


MARKS = ["{{", "}}", "[[", "]]", "{|", "|}", "[http://x", "[[a|", "{{{", "<ref>", "<ref", "<!--", "<nowiki>", "<code>\n",
         "''", "|", "=", "*", "(", "&amp;", "<br>", "__NOTOC__", "{{a|", "[[File:x|"]  # fmt: skip


@pytest.mark.parametrize("mark", MARKS)
def test_marks_that_never_end_take_linear_time(mark: str) -> None:
    for length in (700_000, 4_000_000):
        with no_quadratic_pass(), contextlib.suppress(NotText):  # more marks than a page has
            plain_text(mark * (length // len(mark)))


def test_nesting_takes_linear_time() -> None:
    for opening, closing in (("[[a|", "]]"), ("{{a|", "}}"), ("{|\n", "|}"), ("<ref>", "</ref>")):
        with no_quadratic_pass():
            plain_text(opening * 20_000 + "x" * 500_000 + closing * 20_000)
