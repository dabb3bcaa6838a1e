"""Task files and their data: what becomes of a row, and one sentence for each mistake."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import InputError
from bessemer.tasks.files import Item, open_task, shipped_tasks

ROWS = {
    "hellaswag": {"activity_label": "Baking", "ctx_a": "She [title] mixes.", "ctx_b": "she", "endings": ["bakes.", "flies."], "label": "1"},
    "arc": {"question": "Why?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "C"},
    "piqa": {"goal": "Open it", "sol1": "pull", "sol2": "push", "label": 0},
    "boolq": {"passage": "It is.", "question": "is it", "answer": True},
    "lambada": {"text": "one two three"},
    "text": {"text": "all of this"},
}  # fmt: skip


def write(folder: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_shipped_tasks_ask_as_they_should(tmp_path: Path) -> None:
    assert set(shipped_tasks()) == set(ROWS)
    items = {}
    for name, row in ROWS.items():
        write(tmp_path, [row], f"{name}.jsonl")
        (items[name],) = open_task(f"{name}:{name}.jsonl", tmp_path).items
    assert items["hellaswag"] == Item("Baking: She.  mixes. She".replace(".  ", ". "), (" bakes.", " flies."), 1)
    assert items["arc"] == Item("Question: Why?\nAnswer:", (" x", " y", " z"), 2)
    assert items["piqa"] == Item("Question: Open it\nAnswer:", (" pull", " push"), 0)
    assert items["boolq"] == Item("It is.\nQuestion: is it?\nAnswer:", (" no", " yes"), 1)
    assert items["lambada"] == Item("one two", (" three",))
    assert items["text"] == Item("", ("all of this",))


def task(folder: Path, text: str, rows: list[dict[str, Any]] | None = None) -> Any:
    write(folder, rows if rows is not None else [{"q": f"q{n}", "a": "b", "c": ["a", "b"]} for n in range(5)])
    (folder / "own.toml").write_text(f'name = "own"\ndata = "data.jsonl"\n{text}')
    return open_task(str(folder / "own.toml"))


CHOICE = 'kind = "choice"\nprompt = "{{ q }}?"\nchoices = "c"\nanswer = "a"\n'


def test_few_shot_rows_stand_before_and_are_never_the_item_itself(tmp_path: Path) -> None:
    items = task(tmp_path, CHOICE + "few_shot = 2\n").items
    assert items[4].context == "q0? b\n\nq1? b\n\nq4?"
    assert items[0].context == "q1? b\n\nq2? b\n\nq0?"
    assert items[1].context == "q0? b\n\nq2? b\n\nq1?"


@pytest.mark.parametrize(("answer", "right"), [("b", 1), ("1", 1), (1, 1), ("A", 0), (True, 1)])
def test_an_answer_is_a_number_a_letter_or_a_text(tmp_path: Path, answer: Any, right: int) -> None:
    (item,) = task(tmp_path, CHOICE, [{"q": "q", "a": answer, "c": ["a", "b"]}]).items
    assert item.right == right


@pytest.mark.parametrize(("answer", "right"), [(" b", 1), ("b", 1), ("a", 0), (" a", 2), ("B", 1)])
def test_white_space_is_part_of_a_choice_and_may_be_left_out_of_an_answer(
    tmp_path: Path, answer: str, right: int
) -> None:
    (item,) = task(tmp_path, CHOICE, [{"q": "q", "a": answer, "c": ["a", " b", " a"]}]).items
    assert item.right == right


def test_line_ends_of_a_text_are_those_of_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(b"a\r\nb\rc\n")
    assert open_task("text:own.txt", tmp_path).items[0].continuations == ("a\nb\nc\n",)


def test_data_may_be_compressed_a_table_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one two"}\n'))
    (tmp_path / "b.csv").write_text("text\none two\n")
    (tmp_path / "c.json").write_text('[{"text": "one two"}]')
    for name in ("a.jsonl.gz", "b.csv", "c.json"):
        assert open_task(f"lambada:{name}", tmp_path).items == (Item("one", (" two",)),)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["one two"]}), tmp_path / "d.parquet")
    assert open_task("lambada:d.parquet", tmp_path, limit=5).items == (Item("one", (" two",)),)


EXACT = 'kind = "exact"\nprompt = "x"\nanswers = "a"\n'
CLOZE = 'kind = "cloze"\nprompt = "x"\ntarget = "{{ a }}"\n'


@pytest.mark.parametrize(
    ("text", "row", "key"),
    [
        ('kind = "choice"\nprompt = "x"\n', {}, "choices"), (CLOZE + 'answers = "a"\n', {}, "answers"), ('kind = "guess"\n', {}, "kind"),
        ("kind = ", {}, "TOML"), (CHOICE + "few_shots = 2\n", {}, "few_shots"), (CHOICE + "few_shot = 9\n", {}, "few_shot"),
        (CHOICE + 'examples = "data.jsonl"\n', {}, "examples"), (CHOICE + 'stop = ["x"]\nmax_tokens = 3\n', {}, "max_tokens"),
        (EXACT + 'stop = [".", ""]\n', {}, "stop"), (EXACT.replace('"a"', '"{{ a }}"'), {}, "answers"), (EXACT, {"a": []}, "answers"),
        (EXACT, {"a": None}, "answers"), (CLOZE, {"a": None}, "target"), (CLOZE.replace("{{ a }}", "a"), {}, "target"),
        (CHOICE.replace("{{ q }}", "{{ q"), {}, "prompt"), (CHOICE.replace("{{ q }}", "{{ question }}"), {}, "prompt"),
        (CHOICE.replace("{{ q }}", "{{ 1 / 0 }}"), {}, "prompt"), (CHOICE.replace("{{ q }}", "{{ q.__class__.__mro__ }}"), {}, ""),
        (CHOICE.replace("{{ q }}", "{% for i in range(10**9) %}a{% endfor %}"), {}, "prompt"), (CHOICE, {"q": "\ud800"}, "row 1"),
        (CHOICE, {"q": None}, "prompt"), (CHOICE.replace('answer = "a"', 'answer = "label"'), {}, "label"), (CHOICE, {"a": "z"}, "answer"),
        (CHOICE, {"a": "A", "c": ["B", "A"]}, "answer"), (CHOICE, {"a": "1", "c": ["3", "4", "1"]}, "answer"), (CHOICE, {"c": ["a"]}, "choices"),
        (CHOICE, {"c": "a"}, "choices"), (CHOICE, {"c": ["a", None]}, "choices"), (CHOICE, {"c": ["a", "a"]}, "choices"), (CHOICE, None, "rows"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, row: dict[str, Any] | None, key: str) -> None:
    rows = None if row == {} else [] if row is None else [{"q": "q", "a": "a", "c": ["a", "b"], **row}]
    with pytest.raises(InputError) as error:
        task(tmp_path, text, rows)
    assert key in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("none.toml", "no task file"), ("hellaswag", "say where its data is"), ("hellaswag:none.jsonl", "cannot be read (No such file"),
        ("hellaswag:x.pdf", "data is one of"), ("lambada:broken.jsonl", "line 2 is no JSON"), ("lambada:list.jsonl", "row 1: no object"),
        ("lambada:wide.csv", "row 1 has 2 cells"),
    ],
)  # fmt: skip
def test_data_that_is_not_there_or_damaged(tmp_path: Path, reference: str, complaint: str) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a b"}\n{"te')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "wide.csv").write_text("text\none two,\n")
    with pytest.raises(InputError) as error:
        open_task(reference, tmp_path)
    assert complaint in str(error.value)


@pytest.mark.parametrize("url", ["s3://bucket/tasks", "hf://datasets/owner/name"])
def test_data_in_stores_and_on_the_hub(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import fs

    folder = tmp_path / url.partition("://")[2]
    folder.mkdir(parents=True)
    write(folder, [ROWS["hellaswag"]] * 3)
    (folder / "more.jsonl.gz").write_bytes(gzip.compress((folder / "data.jsonl").read_bytes()))
    stand_in = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr("bessemer.storage.arrow_filesystem", lambda *_: stand_in)
    local = open_task(f"hellaswag:{folder}/data.jsonl", tmp_path)
    for name in ("data.jsonl", "more.jsonl.gz"):
        assert open_task(f"hellaswag:{url}/{name}", tmp_path).items == local.items
    with pytest.raises(InputError, match=f"hellaswag: {url}/none.jsonl: cannot be read"):
        open_task(f"hellaswag:{url}/none.jsonl", tmp_path)


def test_a_store_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("bessemer.storage.filesystem", silent)
    with pytest.raises(InputError, match=r"s3://bucket/x.jsonl: cannot be read \(no route to host"):
        open_task("lambada:s3://bucket/x.jsonl", tmp_path)


def test_a_line_of_text_is_a_row_and_a_text_of_any_ending_is_one(tmp_path: Path) -> None:
    for name in ("lines.txt", "module.py"):
        (tmp_path / name).write_text("one two\n\nthree four\n")
    items = open_task(f"lambada:{tmp_path}/lines.txt").items
    assert [(item.context, item.continuations) for item in items] == [("one", (" two",)), ("three", (" four",))]
    for name in ("lines.txt", "module.py"):
        (item,) = open_task(f"text:{tmp_path}/{name}").items
        assert item.continuations == ("one two\n\nthree four\n",)
    with pytest.raises(InputError, match=r"module.py: data is one of \.jsonl"):
        open_task(f"lambada:{tmp_path}/module.py")


def test_a_shipped_task_may_have_a_name_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two\n")
    assert open_task(f"lambada:{tmp_path}/a.txt").file.name == "lambada"
    assert open_task(f"hard=lambada:{tmp_path}/a.txt").file.name == "hard"
    assert open_task(f"text:{tmp_path}/a.txt").file.name == "text-a"
    assert open_task(f"mine=text:{tmp_path}/a.txt").file.name == "mine"
    with pytest.raises(InputError, match="'a b' is no name"):
        open_task(f"a b=text:{tmp_path}/a.txt")


@pytest.mark.parametrize(
    ("choices", "answer", "right"),
    [
        (["no", "yes"], "True", 1),
        (["no", "yes"], False, 0),
        (["Yes", "No"], True, 0),
        (["yes", "no"], "false", 1),
        (["wrong", "right"], True, 1),
        (["True", "False"], True, 0),
        (["True", "False"], "false", 1),
    ],
)
def test_truth_values_are_answers(tmp_path: Path, choices: list[str], answer: object, right: int) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"answer": answer}) + "\n")
    (tmp_path / "task.toml").write_text(
        f'name = "t"\nkind = "choice"\ndata = "data.jsonl"\nprompt = "Is it?"\nchoices = {json.dumps(choices)}\nanswer = "answer"\n'
    )
    assert open_task(str(tmp_path / "task.toml")).items[0].right == right


def test_what_a_task_asks_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two\n")
    (tmp_path / "b.txt").write_text("one two\n")
    contents = {
        open_task(f"{name}:{tmp_path}/{file}.txt").content for name in ("lambada", "x=lambada") for file in "ab"
    }
    (tmp_path / "a.txt").write_text("one three\n")
    assert len(contents) == 1 and open_task(f"lambada:{tmp_path}/a.txt").content not in contents


def test_an_example_is_never_the_row_itself(tmp_path: Path) -> None:
    rows = [{"q": f"q{n}", "a": f"a{n}"} for n in range(4)]
    for name in ("data", "examples"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.toml").write_text(
        'name = "t"\nkind = "cloze"\ndata = "data.jsonl"\nexamples = "examples.jsonl"\nfew_shot = 2\n'
        'prompt = "{{ q }}"\ntarget = "{{ a }}"\nseparator = " | "\n'
    )
    contexts = [item.context for item in open_task(str(tmp_path / "task.toml")).items]
    assert contexts == ["q1 a1 | q2 a2 | q0", "q0 a0 | q2 a2 | q1", "q0 a0 | q1 a1 | q2", "q0 a0 | q1 a1 | q3"]


@pytest.mark.parametrize(
    ("choices", "answer", "template", "right"),
    [
        ([1, 2, 3], 2, "answer", None), (["1", "2", "3"], 2, "answer", None), ([1, 2, 3], 2, "answer | int", 2),
        ([1, 2, 3], 2, "choices.index(answer)", 1), ([3, 4, 5], 4, "answer", 1), (["a", "b"], 1, "answer", 1),
        (["0", "1"], 1, "answer", 1),
    ],
)  # fmt: skip
def test_a_number_that_is_also_a_text_is_refused(
    tmp_path: Path, choices: list[object], answer: int, template: str, right: int | None
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"choices": choices, "answer": answer}) + "\n")
    (tmp_path / "task.toml").write_text(
        f'name = "t"\nkind = "choice"\ndata = "data.jsonl"\nprompt = "x"\nchoices = "choices"\nanswer = "{template}"\n'
    )
    if right is None:
        with pytest.raises(InputError, match="may be the number of a choice from 0, or the text of another one"):
            open_task(str(tmp_path / "task.toml"))
    else:
        assert open_task(str(tmp_path / "task.toml")).items[0].right == right


def test_one_stop_is_a_list_of_one(tmp_path: Path) -> None:
    assert task(tmp_path, EXACT + 'stop = "."\n', [{"a": "y"}]).file.stop == (".",)
