import base64
import json
import random

import pytest

from bessemer.corpus.document import Reject
from bessemer.corpus.filters.rules import apply
from bessemer.recipe import Rules
from bessemer.text.statistics import Statistics
from tests.corpus.language_samples import DECLARATION
from tests.costs import no_quadratic_pass

RULES = Rules().of_source()
LINE = "a line of text that says something number {}\n"
GOOD = "".join(LINE.format(number) for number in range(20))


def judge(text: str, rules: Rules) -> Reject | None:
    return apply.judge(Statistics(text), rules)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None), ("", "empty"), (" \n\t ", "empty"), ("short", "too_short"), ("x" * 199, "too_short"),
        ("ab cd " * 200_000, "too_long"), ("word " * 300, None), ("0.125 17 3e-5 " * 300, "long_lines"),
        ("+-*/ {}()\n" * 50, "not_text"), ("+–—“” …€\n" * 50, "not_text"),
        ("the same line again\n" * 50, "repetitive"),
    ],
)  # fmt: skip
def test_texts_are_judged_by_the_basic_rules(text: str, reason: str | None) -> None:
    verdict = judge(text, RULES)
    assert (verdict and verdict[0]) == reason


def test_limits_come_from_the_recipe() -> None:
    short = judge("x" * 200, RULES.model_copy(update={"min_characters": 201}))
    assert short == ("too_short", "200 (limit 201) characters")
    assert judge("x" * 200, RULES) is None
    assert judge(GOOD, RULES.model_copy(update={"max_characters": len(GOOD) - 1})) is not None
    assert judge(GOOD, RULES.model_copy(update={"max_characters": len(GOOD)})) is None


def test_a_limit_of_the_recipe_holds_for_every_document() -> None:
    prose = "The boat came late because the wind had turned. " * 40
    assert judge(prose, RULES) is None
    rules = Rules(max_mean_line_length=1000)
    assert judge(prose, rules) == ("long_lines", f"mean line of {len(prose)} (limit 1000) characters")
    long = judge("x" * 200, Rules(max_mean_line_length=199.9999))
    assert long == ("long_lines", "mean line of 200 (limit 199.9999) characters")
    assert judge("0.125 17 3e-5 " * 300, Rules(max_mean_line_length=1e9)) is None


THAI = "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ "
"""Article 1 of the Universal Declaration of Human Rights."""


@pytest.mark.parametrize("language", [*DECLARATION, "th", "technical"])
def test_prose_on_one_line_is_kept(language: str) -> None:
    technical = (
        "Call open(path, mode='rb') first (see https://docs.example.org/3/library/functions.html#open, section 4.2.1), "
        "and check that errno is 0; on 64-bit machines since 1998 the limit is 2147483647 bytes, or about 2 GB. "
        "When the file is on a disk of another machine, wait until the lock is free before you read the first block, "
        "and close it again even if an exception was raised: the with statement does both for you. "
    )
    text = {**DECLARATION, "th": THAI, "technical": technical}[language].replace("\n", " ")
    line = " ".join([text] * (2400 // len(text) + 1))
    assert judge(line, RULES) is None
    assert judge(line.replace(" ", "\u3000"), RULES) is None


def _machine_made() -> dict[str, str]:
    rng = random.Random(3)
    data = rng.randbytes(6000)
    records = [{"id": n, "name": f"item {n}", "price": rng.random(), "tags": ["new", "sale"]} for n in range(90)]
    script = "".join(f"function f{n}(a,b){{return a[{n}]!==b?void 0:(t.q=null,e&&e(a,{n}))}}" for n in range(60))
    return {
        "json": json.dumps(records),
        "minified": script,
        "styles": "".join(f".c{n}>a:hover{{color:#{n:03x};margin:0 {n}px}}" for n in range(120)),
        "svg": "<path d='" + " ".join(f"M{rng.random():.2f},{n} L{n}" for n in range(300)) + "'/>",
        "base64": base64.b64encode(data).decode(),
        "base85": base64.b85encode(data).decode(),
        "hexadecimal": data.hex(" "),
        "hashes": " ".join(rng.randbytes(32).hex() for _ in range(60)),
        "genome": "".join(rng.choice("ACGT") for _ in range(5000)),
        "table": " ".join(f"{rng.gauss(0, 1):.4f}" for _ in range(800)),
        "addresses": " ".join(f"https://example.com/shop/item{n}?id={n * 7919}&page={n}" for n in range(80)),
    }


@pytest.mark.parametrize(("name", "text"), _machine_made().items())
def test_minified_code_and_data_on_one_line_are_rejected(name: str, text: str) -> None:
    verdict = judge(text, RULES)
    assert verdict is not None
    assert verdict[0] == "long_lines"
    assert "minified code or data" in verdict[1]


def test_alphanumeric_share_agrees_over_scripts() -> None:
    assert Statistics("ab1 +-").alphanumeric_share == pytest.approx(3 / 5)
    assert Statistics("äb1 +-").alphanumeric_share == pytest.approx(3 / 5)
    assert Statistics("日本語。\u3000あ").alphanumeric_share == pytest.approx(4 / 5)


def test_a_word_of_fifty_megabytes_is_decided_in_linear_time() -> None:
    rules = RULES.model_copy(update={"max_characters": 100_000_000})
    word = "x" * 50_000_000
    with no_quadratic_pass():
        verdict = judge(word, rules)
    assert verdict is not None
    assert verdict[0] == "long_lines"
