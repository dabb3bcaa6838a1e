"""Wikitext to text: visible text stays by line; markup, boxes and tables are removed."""

import pytest

from bessemer.corpus.extract.wikitext import plain_text

PAGES = [
    ("'''Bold''' and ''italic'' and '''''both'''''.", "Bold and italic and both."),
    ("A [[link]], a [[target|label]], [[Rome]]s.", "A link, a label, Romes."),
    ("See [http://a.example/x the site] and [https://b.example].", "See the site and ."),
    ("Text.<ref>Note {{cite|a=1}}</ref> More.<ref name=x /> End.", "Text. More. End."),
    ("A{{box|x={{inner|[[y]]}}|z}}B", "A B"),
    ("{{lang|fr|mot juste}} and {{nowrap|1 2}} and {{convert|5|km|mi}}", "mot juste and 1 2 and 5 km"),
    ("Before\n{| class=x\n! a\n|-\n| b || [[c]]\n{|\n| inner\n|}\n|}\nAfter", "Before\n\nAfter"),
    ("[[File:A.jpg|thumb|A [[cat]] sits]]Text[[Category:Cats]][[de:Katze]]", "Text"),
    ("[[:Category:Cats]]", "Category:Cats"), ("a<!-- hidden [[ {{ -->b", "ab"), ("x<br>y<br/>z", "x\ny\nz"),
    ("&lt;p&gt; &amp; caf&eacute;&nbsp;x", "<p> & café x"),
    ("<nowiki>[[not a link]]</nowiki>", "[[not a link]]"), ("__NOTOC__\nText", "Text"),
    ("He (born {{birth|1950}}) sang.", "He (born ) sang."), ("He ({{lang-x}}; ) sang.", "He sang."),
    ("* a\n* b\n** c\n# d\n: e", "- a\n- b\n  - c\n- d\ne"),
    ("Text\n== Empty ==\n{{box}}\n== Full ==\nMore\n=== Sub ===\n== Last ==\n", "Text\n\nFull\n\nMore"),
    ("== A ==\n=== B ===\nText", "A\n\nB\n\nText"), ("a [x] b", "a [x] b"),
    ("unclosed [[link and text", "unclosed [[link and text"),
    ("stray ]] and }} stay out\n|}\nso {|x|} is a set", "stray ]] and }} stay out\n|}\nso {|x|} is a set"),
    ("a | b", "a | b"), ("", ""),
    ("{{formatnum:1250}} m, {{FORMATNUM:77.5}} and {{formatnum:2000000|R}} trees", "1250 m, 77.5 and 2000000 trees"),
    ("{{convert|5|to|10|km|mi|0}} or {{convert|6|ft|2|in|m}} or {{cvt|5|-|10|kg}}", "5 to 10 km or 6 ft 2 in or 5–10 kg"),
    ("{{convert|37.5|C|F|abbr=on}}, {{val|5.5|0.2|ul=kg}}, {{val|6.02|e=23}}", "37.5 °C, 5.5±0.2 kg, 6.02×10²³"),
    ("{{frac|1|2}}, {{frac|3|1|4}} and {{sfrac|8}}", "1/2, 3 1/4 and 1/8"),
    ("10<sup>6</sup> m<sup>-2</sup>, 1<sup>st</sup>, H<sub>2</sub>O, 10{{sup|9}}", "10⁶ m⁻², 1st, H2O, 10⁹"),
    ("1990{{ndash}}1995, 5{{nbsp}}km{{snd}}so{{mdash}}and rock {{'}}n{{'}} roll", "1990–1995, 5 km – so—and rock 'n' roll"),
    ("{{as of|2010|5|lc=y}}, {{circa|1500}}, {{c.}} 1600, {{US$|5 million}}", "as of 2010-5, c. 1500, c. 1600, US$5 million"),
    ("{{quote|text=What was said.|author=A. B.}} Next", "What was said.\nA. B.\nNext"),
    ("One.{{quote|What [[was|is]] said.}}Two.", "One.\nWhat is said.\nTwo."),
    ("{{lang|fr|text=mot}} {{lang-de|Wort}} {{langx|es|palabra}} {{transl|ar|ALA|kitab}}", "mot Wort palabra kitab"),
    ("{{abbr|Dr|Doctor}} {{IPA|/x/}} {{nihongo|Tokyo|東京|tōkyō}} {{nowrap|1=a=b}}", "Dr /x/ Tokyo (東京, tōkyō) a=b"),
    ("{{Template:small|{{unknown|x}}in {{nowrap|{{formatnum:12}}&nbsp;km}}}}", "in 12 km"),
    ("{{hlist|a|b}}{{ubl|c|d}}e", "a · b\nc\nd\ne"),
    ("{{#if: x | yes | no }} {{#if:|yes|no}} {{lc:ABC}}", "yes no ABC"),
    ("''{{PAGENAME}}'' is cited.{{cite web|title=x|url=http://a}} {{efn|n}}More{{sfn|x}}", "A Title is cited. More"),
    ("if x<y and z>w then a<i and b>c, i<=3", "if x<y and z>w then a<i and b>c, i<=3"),
    ("a <foo>b</foo> c<unclosed d", "a <foo>b</foo> c<unclosed d"),
    ("One.<hr>Two.<h3>Head</h3>Three.<div>x</div>y<br />z<td>1</td><td>2</td>", "One.\nTwo.\nHead\nThree.\nx\ny\nz\n1\n\n2"),
    ("[[CSI: Miami]], [[Re:Zero]], [[Star Trek: Picard|Picard]], [[Foo|a|b]]", "CSI: Miami, Re:Zero, Picard, a|b"),
    ("word<ref name=x/>next<ref name=O'Brien>n</ref>word{{cn}} 10{{x}}km 東京{{x}}は", "word next word 10 km 東京は"),
    ("a<nowiki/>b auto{{shy}}matic <nowiki>{{x}}</nowiki>", "ab automatic {{x}}"),
    ('<math>x^2 +\n 3</math> and <math display="block">y</math>', "$x^2 + 3$ and $y$"),
    ("f() and ( ) stay, ({{x}}) and ({{x}}; ) go", "f() and ( ) stay, and go"),
    ("__FILE__, ~~~~ and \ue000 stay__NOTOC__", "__FILE__, ~~~~ and \ue000 stay"),
    ("<ruby>漢<rp>(</rp><rt>かん</rt><rp>)</rp></ruby> <q>so</q>", "漢(かん) “so”"),
    ("我在-{zh-hans:中国;zh-hant:中國}-生活-{H|zh:x}-", "我在中国生活"),
    ("<includeonly>no</includeonly><noinclude>yes</noinclude>", "yes"),
    ("{{quote|" + "[[a]] " * 60 + "}}", ("a " * 60).strip()),
    ("Lead text {{{1|default one}}} tail {{{name}}}.", "Lead text default one tail ."),
    ("{{lang|fr|{{{1|x}}}}} {{{1|{{{2|y}}}}}} {{{1|{{lang|fr|z}}}}} {{{a|}}}", "x y z"),
    ("A {{{{{1}}}|a}} {{ {{{1|lang}}}|fr|b}} {{{{{1|lang}}}|fr|c}} {{lang|fr|{{{1}}}}} D", "A b c D"),
    ("{{{lang|fr|a}}, {{lang|fr|b}}} {{{{1|c}}}} {{lang|fr|x [y] z}}", "{a, b} {c} x [y] z"),
    ("Text\n{| never ends\n" + "| word " * 600, None),
]  # fmt: skip


@pytest.mark.parametrize(("source", "shown"), PAGES, ids=range(len(PAGES)))
def test_the_text_a_reader_sees_is_kept(source: str, shown: str | None) -> None:
    text = plain_text(source, "A Title")
    assert text == shown or (shown is None and text.startswith("Text") and text.count("word") == 600)


REST = "\n== Two ==\n* item [[a|b]]\n{{box|x}}\nLast {{lang|fr|mot}} and {{{1|one}}} [x].\n{|\n| cell\n|}\nEnd."
SHOWN_REST = "\n\nTwo\n\n- item b\n\nLast mot and one [x].\n\nEnd."


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("Lead {{cite web|title=x}. Words.", "Lead {{cite web|title=x}. Words."),
        ("Code uses {{ and braces.", "Code uses {{ and braces."), ("A {{{1|b}} c", "A { c"), ("A {{{ b", "A {{{ b"),
        ("A {{{{{1|b}}} c", "A {{b c"), ("A {{lang|fr|{{{1|b}} c", "A {{lang|fr|{ c"),
        ("A\n{| class=x\n| b", "A\n{| class=x\n| b"), ("A {{ b\n{|\n| c {{ d\n|}\ne", "A {{ b\n\ne"),
        ("A {{ b. " * 1000, "A {{ b. " * 1000),
    ],
)  # fmt: skip
def test_unclosed_markup_keeps_the_rest_of_the_page(source: str, shown: str) -> None:
    assert plain_text(source + REST) == shown.rstrip() + SHOWN_REST


def test_code_keeps_its_lines() -> None:
    code = "def f(x):\n    if x:\n        return  [[1]]\n\n    # * no list\n== no heading =="
    text = plain_text(f"Before\n<syntaxhighlight lang=python>\n{code}\n</syntaxhighlight>\n''After''")
    assert text == f"Before\n\n{code}\n\nAfter"
