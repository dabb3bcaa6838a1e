"""The arithmetic of a large corpus, held against sums done by hand, and against what the pipeline really does."""

import json
import re
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.errors import InputError
from bessemer.plan import corpus


def rates() -> dict[str, object]:
    value = {"value": 1.0, "why": ""}
    return {
        "date": "d",
        "machine": "m",
        "stages": [
            {"stage": "one", "of": "raw", "megabytes_per_cpu_second": 10.0},
            {"stage": "two", "of": "kept", "megabytes_per_cpu_second": 1.0},
        ],
        "shares": {
            "raw_per_input": {"value": 4.0},
            "text_per_raw": {"value": 0.1},
            "in_language_per_text": {"value": 0.5},
            "passed_per_in_language": {"value": 0.5},
            "kept_per_passed": {"value": 0.5},
        },
        "sizes": {
            **dict.fromkeys(corpus._SIZES, value),
            "document_bytes": {"value": 1000.0},
            "signature_bytes": {"value": 448.0},
            "dedup_bytes": {"value": 1000.0},
            "bytes_per_token": {"value": 5.0},
            "token_bytes": {"value": 2.0},
        },
    }


def test_by_hand() -> None:
    """1 TB -> 4 TB raw -> 400 GB text -> 200 -> 100 passed -> 50 kept."""
    found = corpus.plan(1e12, rates(), machines=2, cores=10, price=0.1, storage_price=0.02)
    assert found["flow_bytes"] == pytest.approx(
        {"input": 1e12, "raw": 4e12, "text": 4e11, "in_language": 2e11, "passed": 1e11, "kept": 5e10}
    )
    one, two = found["stages"]
    assert one["core_hours"] == pytest.approx(4e12 / 10e6 / 3600)  # 400,000 s
    assert two["core_hours"] == pytest.approx(5e10 / 1e6 / 3600)  # 50,000 s
    assert found["core_hours"] == pytest.approx(450_000 / 3600)
    assert found["compute_hours"] == pytest.approx(450_000 / 3600 / 20)
    assert found["transfer_hours"] == pytest.approx(1e12 / 2.5e9 / 3600)
    assert found["hours"] == found["compute_hours"]
    assert found["documents"]["passed"] == pytest.approx(1e8)
    assert found["storage_bytes"]["exchange of duplicates"] == pytest.approx(1e11)
    assert found["tokens"] == pytest.approx(1e10)
    assert found["storage_bytes"]["token shards"] == pytest.approx(2e10)
    assert found["compute_money"] == pytest.approx(12.5)
    assert found["storage_money"] == pytest.approx(sum(found["storage_bytes"].values()) / 1e9 * 0.02)
    assert sum(stage["share"] for stage in found["stages"]) == pytest.approx(1)


def test_a_stage_on_one_machine_or_core_is_not_divided() -> None:
    given = rates()
    for on, at_once in (("cluster", 20), ("machine", 10), ("core", 1)):
        given["stages"][1]["on"] = on
        found = corpus.plan(1e12, given, machines=2, cores=10)
        assert found["core_hours"] == pytest.approx(125)
        assert found["compute_hours"] == pytest.approx(400_000 / 3600 / 20 + 50_000 / 3600 / at_once)


def test_repeats_count_where_they_are_asked_for() -> None:
    given = rates()
    for value, rate, exchanged in (("paragraph", 10.0, 0.5), ("ngram", 5.0, 2.0)):
        row = {"stage": f"lines, {value}", "of": "kept", "megabytes_per_cpu_second": rate, "exchanged": exchanged}
        given["stages"].insert(1, {**row, "option": "paragraphs", "value": value})
    without = corpus.plan(1e12, given)
    assert [row["stage"] for row in without["stages"]] == ["one", "two"]
    assert "exchange of repeats" not in without["storage_bytes"]
    found = corpus.plan(1e12, given, repeats={"paragraphs": "ngram"})
    assert [row["stage"] for row in found["stages"]] == ["one", "lines, ngram", "two"]
    assert found["core_hours"] - without["core_hours"] == pytest.approx(5e10 / 5e6 / 3600)
    assert found["storage_bytes"]["exchange of repeats"] == pytest.approx(1e11)
    assert found["shuffle_bytes"] - without["shuffle_bytes"] == pytest.approx(1e11)
    with pytest.raises(InputError, match="--spans words: these rates have no such stage"):
        corpus.plan(1e12, given, repeats={"spans": "words"})


def test_twice_the_corpus_is_twice_the_work() -> None:
    one, two = corpus.plan(1e12, rates()), corpus.plan(2e12, rates())
    assert two["core_hours"] == pytest.approx(2 * one["core_hours"])


def test_the_work_is_cut_as_the_pipeline_cuts_it() -> None:
    partition = pytest.importorskip("bessemer.corpus.partition")
    assert partition.PARTITION_BYTES[1] == corpus.PARTITION_BYTES
    for name in (
        "BUCKET_BYTES",
        "LARGE_BUCKET_BYTES",
        "MANY_BUCKETS",
        "LARGE_PARTITION_BYTES",
        "MANY_PARTITIONS",
        "RANGES",
    ):
        assert getattr(partition, name) == getattr(corpus, name)
    for num_bytes, buckets, ranges in (
        (1 << 34, 256, 256), (1 << 35, 512, 256), (1 << 40, 4096, 256), (10**14, 11_642, 254), (10**15, 116_416, 256),
    ):  # fmt: skip
        partitions, *found = corpus.cut(num_bytes)
        assert found == [ranges, buckets]
        assert partition.num_buckets(num_bytes) == buckets
        assert -(-buckets // partition.range_size(buckets)) == ranges
        assert partitions == pytest.approx(num_bytes / partition.partition_bytes(num_bytes), abs=1, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100TB", 1e14),
        ("1.5PB", 1.5e15),
        ("250GiB", 250 * 2**30),
        ("1000B", 1000),
        ("5 mb", 5e6),
        ("1e3TB", 1e15),
        ("1.5E-1 PB", 1.5e14),
        ("2EB", 2e18),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert corpus.parse_bytes(text) == pytest.approx(size)


@pytest.mark.parametrize("text", ["", "TB", "-5TB", "1eTB", "1e500TB", "5 XB", "5TBs", "9" * 50, "100", "0TB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(InputError, match="is not a size"):
        corpus.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [("100", "100 of what? write it with a unit, as 100TB"), ("-5TB", "it must be above zero"), ("-5", "above zero")],
)
def test_the_command_says_what_is_wrong_with_a_size(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["crawl", text]) == InputError.exit_code
    assert message in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["crawl", "100TB"]) == 0
    shown = capsys.readouterr().out
    assert "core-hours" in shown and "extract" in shown and "exchange of duplicates" in shown and "repeats" not in shown
    assert "text per raw 0.0325" in shown and "document bytes 4000; give your crawl's own by --rates FILE" in shown
    assert run_command(["crawl", "100TB", "--paragraphs", "ngram", "--spans", "words"]) == 0
    shown = capsys.readouterr().out
    assert "paragraphs, ngram" in shown and "spans, words" in shown and "exchange of repeats" in shown
    (tmp_path / "rates.json").write_text(json.dumps(rates()))
    assert run_command(["crawl", "1TB", "--rates", str(tmp_path / "rates.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["core_hours"] == pytest.approx(125)


def test_the_shares_are_those_of_published_corpora() -> None:
    """FineWeb kept 157.2 billion tokens of the 3.16 billion pages of CC-MAIN-2024-10 (424.7 TiB of HTML), which the shares were set
    by; C4, which took no part, 156 billion of the 2.5 billion of April 2019: by the page, since pages have grown."""
    raw, pages = 424.7 * 2**40, 3.16e9
    shares = corpus.load_rates()["shares"]
    found = corpus.plan(raw / shares["raw_per_input"]["value"], corpus.load_rates())
    assert found["flow_bytes"]["raw"] == pytest.approx(raw)
    assert found["tokens"] == pytest.approx(157.2e9, rel=0.03)
    assert found["tokens"] / pages == pytest.approx(156e9 / 2.5e9, rel=0.25)
    assert all(re.search(r"\d{4}", share["why"]) for share in shares.values()), "a source with its year"


def test_money_has_its_currency_and_the_source_of_its_prices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["crawl", "100TB"]) == 0
    shown, found = capsys.readouterr().out, corpus.plan(1e14, corpus.load_rates())
    core, stored = (found["prices"][name] for name in ("core_hour", "gigabyte_month"))
    assert f"{found['compute_money']:,.0f} USD for the cores" in shown
    assert f"0.05 a core-hour ({core['why']}), 0.023 a gigabyte and month ({stored['why']})" in shown
    assert run_command(["crawl", "100TB", "--price", "1", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["prices"]["core_hour"] == {"value": 1.0, "why": "--price"} and own["prices"]["currency"] == "USD"
    assert own["compute_money"] == pytest.approx(own["core_hours"]) and own["storage_money"] == found["storage_money"]
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({**rates(), "prices": {**found["prices"], "currency": "EUR"}}))
    assert run_command(["crawl", "1TB", "--rates", str(path)]) == 0
    assert " EUR for the cores" in capsys.readouterr().out
    path.write_text(json.dumps({**rates(), "prices": {"currency": "EUR"}}))
    assert run_command(["crawl", "1TB", "--rates", str(path)]) == 2
    assert "not a file of rates" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0TB"], "it must be above zero"),
        (["1TB", "--cores", "0"], "--cores: 0"),
        (["1TB", "--rates", "nowhere.json"], "nowhere.json: cannot be read"),
        (["1TB", "--price", "-1"], "a price is not below 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["crawl", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [{"stages": []}, {"stages": [{**rates()["stages"][0], "on": "moon"}]}, {"sizes": {}}, {"date": ""}, {"shares": {}}],
)
def test_damaged_rates_are_named(damage: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({**rates(), **damage}))
    with pytest.raises(InputError, match="not a file of rates"):
        corpus.load_rates(path)


def test_the_merge_is_charged_where_buckets_are_merged() -> None:
    given = rates()
    given["stages"].append({"stage": "merge", "of": "kept", "megabytes_per_cpu_second": 1.0})
    small, large = (corpus.plan(num_bytes, given) for num_bytes in (1e10, 1e12))
    assert [row["stage"] for row in small["stages"]] == ["one", "two"] and "merged buckets" not in small[
        "storage_bytes"
    ]
    assert large["stages"][-1]["stage"] == "merge"
    assert large["storage_bytes"]["merged buckets"] == large["storage_bytes"]["cleaned partitions"]
    assert small["row_groups"] == small["partitions"] * small["buckets"]
    assert large["row_groups"] == large["partitions"] * corpus.RANGES + large["buckets"]


def test_the_docs_have_what_the_command_prints() -> None:
    """docs/scale.md: its table row by row, and the sums in its text."""
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    found = corpus.plan(1e14, corpus.load_rates())
    rows = [
        f"| {row['stage']} | {row['bytes_in'] / 1e12:.3g} TB | {row['megabytes_per_cpu_second']:g} | {row['core_hours']:,.0f} |"
        for row in found["stages"]
    ]
    rows.append(f"| all | | | {found['core_hours']:,.0f} |")
    start = text.index("| read WARC |")
    assert text[start:].splitlines()[: len(rows)] == rows
    measured = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "corpus_scale.json").read_text())
    for row in measured["sizes"]:
        line = "| {terabytes:g} TB | {files:,} | {units:,} | {partitions:,} | {buckets:,} | {groups:.0f} million | {cpu_seconds:,.0f} s | "
        line += "{index_rows_cpu_seconds:,.0f} s | {peak_megabytes:,} MB |"
        assert line.format(**row, groups=row["row_groups"] / 1e6) in text
        assert row["peak_megabytes"] < 2000
    prose = " ".join(text.split())
    stages = {row["stage"]: row for row in found["stages"]}
    one_core = stages["metadata"]["core_hours"]
    repeats = {"whole lines": ("paragraphs", "paragraph"), "n-grams": ("paragraphs", "ngram"),
               "spans of words": ("spans", "words"), "of bytes": ("spans", "bytes")}  # fmt: skip
    for name, (option, value) in repeats.items():
        added = corpus.plan(1e14, corpus.load_rates(), repeats={option: value})
        hours, stored = added["core_hours"] - found["core_hours"], added["storage_bytes"]["exchange of repeats"] / 1e12
        assert f"{name} {hours:.0f} core-hours and {stored:.1f} TB of exchange" in prose
    for phrase in (
        f"{found['machines']} machines of {found['cores_per_machine']} cores: {found['hours']:.1f} hours, of them "
        f"{found['hours_on']['cluster']:.1f} on all of them and {one_core:.1f} on one core (metadata); the input needs {found['transfer_hours']:.1f} hours",
        f"{found['core_hours']:,.0f} core-hours at $0.05 are ${found['compute_money']:,.0f}",
        f"at its peak, {sum(found['storage_bytes'].values()) / 1e12:.0f} TB, costs ${found['storage_money']:,.0f} a month",
        f"Cleaned rows, signatures, keys and shingle sets, {found['shuffle_bytes'] / 1e12:.1f} TB",
        f"Extraction is {stages['extract']['share']:.0%} of the work",
    ):
        assert phrase in prose, phrase
