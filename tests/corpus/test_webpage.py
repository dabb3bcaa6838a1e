"""Text of pages as browsers and crawls return them: character sets, menus, lists, code."""

import subprocess
import sys

import pytest

from bessemer.common.errors import InputError
from bessemer.corpus.extract import webpage
from bessemer.recipe import Extract
from tests.costs import no_quadratic_pass

PLAIN = Extract()


@pytest.mark.parametrize("charset", ["zip", "punycode", "unicode_escape", "rot13", "no-such"])
def test_codecs_that_are_not_for_pages_are_never_used(charset: str) -> None:
    page = f'<meta charset="{charset}"><p>déjà vu, naïve façade, crème brûlée, à côté</p>'
    assert webpage.decode_html(page.encode("latin-1"), charset) == page  # detected from the bytes


def test_a_few_bad_bytes_lose_only_their_characters() -> None:
    text = "Grüße, " * 200
    raw = f'<meta charset="utf-8"><p>{text}'.encode() + b"\xff\xfe."
    with pytest.raises(UnicodeDecodeError):
        webpage.decode_html(raw + bytes(range(128, 256)) * 3, max_undecodable=0.01)
    assert webpage.decode_html(raw, max_undecodable=0.01).endswith("Grüße, \ufffd\ufffd.")
    with pytest.raises(UnicodeDecodeError):
        webpage.decode_html(b"<p>\x81\x8d\x8f\x90\x9d" * 9, "utf-8")


@pytest.mark.parametrize("engine", ["resiliparse", "trafilatura"])
@pytest.mark.parametrize("page", ["<div>" * 100_000 + "x" + "</div>" * 100_000, "</y><div>" * 20_000 + "x"])
@pytest.mark.fault(24)
def test_deeply_nested_html_is_read_quickly(page: str, engine: str) -> None:
    metadata: dict[str, str] = {}
    with no_quadratic_pass():
        assert webpage.page_text(page, Extract(engine=engine), metadata).strip() == "x"
    assert metadata == {"extraction": webpage.ALL_TEXT}


ARTICLE = "<main><p>" + "The council voted on the new bridge on Monday. " * 20 + "</p></main>"

NOT_NESTED = {
    "script": "<script>var t = '" + "<div><span>" * 1500 + "'; if (a<b && c<d) {}</script>",
    "style and title": "<title>" + "<b>" * 900 + "</title><style>" + "<i>" * 900 + "</style>",
    "comment": "<!-- " + "<div>" * 5000 + " -->",
    "svg": "<svg viewBox='0 0 9 9'><g>" + "<path d='M0 0'/><use href='#a'/>" * 4000 + "</g></svg>",
    "math": "<math>" + "<mspace/>" * 4000 + "</math>",
    "attribute": "<div data-t='" + "<div>" * 5000 + "'></div>",
    "closed by the next": "<a name=x>" * 700 + "<p>a<br><li>b</li>" * 700 + "<div><b>x</b></div>" * 700,
    "textarea never closed later": "<textarea>" + "<div>" * 5000 + "</TextArea >",
}


@pytest.mark.parametrize("what", NOT_NESTED)
def test_depth_counts_the_parsed_tree(what: str) -> None:
    page = f"<!doctype html><html><head></head><body>{NOT_NESTED[what]}{ARTICLE}</body></html>"
    assert "voted on the new bridge" in webpage.page_text(page, Extract(max_html_bytes=1 << 20))


FITS = f"<body>{'<p>A paragraph of the report. </p>' * 10_000}{ARTICLE}"


@pytest.mark.parametrize(
    ("engine", "page", "fallback"),
    [
        (
            "resiliparse",
            "<svg>" + "<path/>" * 600 + "</svg>" + "<div>" * 508 + ARTICLE,
            None,
        ),  # in html, body, main and p
        ("resiliparse", "<svg>" + "<path/>" * 600 + "</svg>" + "<div>" * 509 + ARTICLE, webpage.ALL_TEXT),
        ("trafilatura", FITS, None),
        ("trafilatura", FITS + "<br>" * webpage.MAX_TAGS, webpage.BY_RESILIPARSE),
        ("trafilatura", "<div>" * 300 + ARTICLE, webpage.BY_RESILIPARSE),
        ("trafilatura", "<div>" * 600 + ARTICLE, webpage.ALL_TEXT),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_page_that_is_too_large_or_deep_uses_the_fallback(engine: str, page: str, fallback: str | None) -> None:
    pytest.importorskip(engine)
    metadata: dict[str, str] = {}
    assert "voted on the new bridge" in webpage.page_text(page, Extract(engine=engine), metadata)
    assert metadata.get("extraction") == fallback


PATHOLOGICAL = (
    "'<div>' * 100_000", "'<b>' * 100_000", "'<table><tr><td>' * 100_000", "'<svg>' * 100_000", "'<ul><li>' * 100_000",
    "'<b><div></b>' * 100_000", "''.join(f'<font c={i}>' for i in range(50_000)) + '<p>x' * 2000", "'<!--' * 100_000",
    "'<p>' + ''.join(f'<font c={i}>' for i in range(500)) + '</p><p>x' * 100_000", "'<a b=\"' * 100_000",
    "'<script>' * 100_000", "'<svg><desc><template>' * 100_000", "'<'  * 100_000", "'<a href=x>' * 20_000",
)  # fmt: skip


@pytest.mark.parametrize("engine", ["resiliparse", pytest.param("trafilatura", marks=pytest.mark.long)])
def test_pathological_nesting_neither_crashes_nor_hangs(engine: str) -> None:
    """Run in a separate process: a crash of the parser would end the tests."""
    pytest.importorskip(engine)
    program = f"""
from bessemer.corpus.extract import webpage
from bessemer.common.errors import NotText
from bessemer.recipe import Extract
for page in ({", ".join(PATHOLOGICAL)}):
    try:
        webpage.page_text(page + "text", Extract(engine={engine!r}))
    except NotText as error:
        print("refused", error)
    else:
        print("read")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(PATHOLOGICAL)
    assert "read" in done.stdout.splitlines()[0]
    assert "refused" in done.stdout.splitlines()[1]


FULL = """<!doctype html><html><head><title>Sorting</title><style>p{color:red}</style></head><body>
<nav class="menu"><ul><li><a href="/">Home</a></li><li><a href="/a">About us</a></li></ul></nav>
<ul id="top"><li><a href="/x">Products</a></li><li><a href="/y">Prices</a></li></ul>
<div id="cookie-banner" class="cookie-consent">We use cookies to improve your experience. <button>Accept</button></div>
<main><article><h1>Sorting lists</h1>
<p>The function <code>sort</code>
 is <b>stable</b>.</p>
<pre><code class="language-python"><span class="k">def</span> f(x):
    if x:
        return 1

    return   2
</code></pre>
<table class="highlighttable"><tr><td class="linenos"><pre>1
2</pre></td><td class="code"><pre>for x in y:
\tprint(x)</pre></td></tr></table>
<ul><li>the first item<ul><li>a nested one</li></ul></li><li>see <a href="/s">the section on stability</a> for more</li></ul>
<ol><li>alpha</li><li>beta</li></ol>
<table><tr><th>Name</th><th>Value</th></tr><tr><td>a</td><td>1</td></tr></table>
<p>Line one<br>line two</p></article></main>
<aside class="sidebar"><h3>Related</h3><ul><li><a href="x">Another post</a></li></ul></aside>
<footer>Copyright 2024 Example. <a href="/privacy">Privacy policy</a></footer>
<script>var x = "script text";</script></body></html>"""

FURNITURE = (
    "Home", "Products", "Prices", "cookies", "Accept", "Related", "Another post", "Copyright", "Privacy", "script",
)  # fmt: skip


def test_main_content_excludes_menus_and_footers() -> None:
    text = webpage.page_text(FULL, PLAIN)
    for word in FURNITURE:
        assert word not in text, word
    lines = text.split("\n")
    assert "The function sort is stable." in lines
    code = "def f(x):\n    if x:\n        return 1\n\n    return   2\n"
    assert code in text
    assert "for x in y:\n\tprint(x)" in text
    assert "1\n2" not in text  # line numbers
    bullets = [line.strip(" •") for line in lines if line.strip().startswith("•")]
    assert bullets == ["the first item", "a nested one", "see the section on stability for more"]
    numbered = [line.split() for line in lines if line[:1] == " " and "a" in line and "." in line]
    assert numbered[:2] == [["1.", "alpha"], ["2.", "beta"]]
    assert [line.split() for line in lines if line.startswith(("Name", "a\t"))] == [["Name", "Value"], ["a", "1"]]
    assert lines[lines.index("Line one") + 1] == "line two"


def test_main_content_false_returns_the_whole_page() -> None:
    text = webpage.page_text(FULL, Extract(main_content=False))
    for word in set(FURNITURE) - {"Accept", "script"}:  # buttons and scripts have no text
        assert word in text, word
    assert "script text" not in text


def test_lists_that_the_library_drops_are_kept() -> None:
    from resiliparse.extract.html2text import extract_plain_text

    page = "<body><main><p>Some words.</p><ul><li>first words</li><li>second words</li></ul></main></body>"
    assert "first" not in extract_plain_text(page, main_content=True)
    assert "first words" in webpage.page_text(page, PLAIN)
    menu = page.replace("first words", "<a>first words</a>").replace("second words", "<a>second words</a>")
    assert "first" not in webpage.page_text(menu, PLAIN)
    assert "first" in webpage.page_text(menu, Extract(max_list_link_share=1.0))


NO_MAIN_CONTENT = {
    "navigation only": f"<html><body><nav>{ARTICLE[6:-7]}</nav></body></html>",
    "a sidebar": f"<html><body><div class=sidebar><div id=sidebar>{ARTICLE[6:-7]}</div></div></body></html>",
    "noscript to the end": f"<html><body><noscript><div>{ARTICLE}</div></body></html>",
}


@pytest.mark.parametrize("engine", ["resiliparse", "trafilatura"])
@pytest.mark.parametrize("where", NO_MAIN_CONTENT)
def test_a_page_without_main_content_keeps_all_its_text(where: str, engine: str) -> None:
    pytest.importorskip(engine)
    metadata: dict[str, str] = {}
    text = webpage.page_text(NO_MAIN_CONTENT[where], Extract(engine=engine), metadata)
    assert text.count("The council voted on the new bridge on Monday.") == 20
    if engine == "resiliparse":
        assert metadata == {"extraction": webpage.ALL_TEXT}
    metadata = {}
    assert webpage.page_text("<html><body><script>x</script></body></html>", Extract(engine=engine), metadata) == ""
    assert metadata == {}


def test_comments_and_surroundings_of_an_article_are_removed() -> None:
    comments = "<div id=comments class=comments><div class=comment><p>A reader says: we need no bridge.</p></div></div>"
    around = "".join(
        f"<div class='{name}'><p>Around the article {number}, in a sentence.</p></div>"
        for number, name in enumerate(("page-footer", "related-posts", "author-box", "Subscribe", "copyright"))
    )
    page = f"<html><body><div><article class='related-x'>{ARTICLE}{around}</article>{comments}</div></body></html>"
    text = webpage.page_text(page, PLAIN)
    assert text.count("voted on the new bridge") == 20
    assert "Around the article" not in text and "A reader says" not in text
    assert "A reader says" in webpage.page_text(page, Extract(comments=True))
    assert webpage.page_text(page, Extract(main_content=False)).count("Around the article") == 5


def test_trafilatura_extracts_the_article() -> None:
    pytest.importorskip("trafilatura", reason="the trafilatura extra is not installed")
    settings = Extract(engine="trafilatura")
    text = webpage.page_text(FULL, settings)
    assert "def f(x):\n    if x:\n        return 1\n" in text
    assert "the first item" in text
    for word in ("Home", "cookies", "Privacy"):
        assert word not in text
    assert "Home" in webpage.page_text(FULL, Extract(engine="trafilatura", main_content=False))


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    webpage.check_engine(PLAIN)
    with pytest.raises(InputError, match=r"corpus.extract.engine: trafilatura is not installed; pip install"):
        webpage.check_engine(Extract(engine="trafilatura"))


@pytest.mark.parametrize(
    "page",
    [
        "<ul><li>a <a href=x>b</a> words words</ul>" * 50_000,
        "<ul>" + "<li>aaa<a href=x>b</a>" * 100_000,
        "<ul><li>a" * 250 + "x" * 500_000,
        '<a b="' * 1_000_000,
    ],
    ids=lambda page: page[:12],
)
def test_extreme_pages_take_linear_time(page: str) -> None:
    with no_quadratic_pass():
        webpage.page_text(page, PLAIN)
