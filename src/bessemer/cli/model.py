"""Commands for trained models: evaluate, generate, chat, import and export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.common.console import counted, interval, say
from bessemer.common.console import score as shown
from bessemer.common.errors import InputError

if TYPE_CHECKING:
    import argparse

    from bessemer.tokens.tokenizer import Tokenizer
    from bessemer.train.generation import Sampling


def evaluate(args: argparse.Namespace) -> Any:
    from bessemer.workflow import stages

    session, resolved = runs.open_trained(args)
    if args.task:
        tasks = (*resolved.evaluate.tasks, *map(_anchored, args.task))
        resolved = resolved.changed(evaluate={"tasks": tuple(dict.fromkeys(tasks))})
    with session.run.lock():
        scores = stages.evaluate(session, resolved, runs.weights(args, session))
        if session.run.report.exists() and not session.results[-1]["skipped"]:
            stages.report(session)  # the existing page shows the previous scores
    if not args.json:
        if session.results[-1]["skipped"]:  # a stage that ran has printed this line
            from bessemer.evaluate.final import score_line

            print(score_line(scores))
        for task in scores.get("tasks", ()):
            print("\n".join(_task_lines(task)))
    return {key: value for key, value in scores.items() if key != "inputs"}


def _anchored(reference: str) -> str:
    """Return the absolute path of an evaluation task given as a YAML file, and any other task name unchanged."""
    return str(Path(reference).absolute()) if reference.endswith(".yaml") else reference


def _task_lines(task: dict[str, Any]) -> list[str]:
    shots = f", {task['few_shot']}-shot" if task["few_shot"] else ""
    rows = []
    for name, score in task["scores"].items():
        within = interval(score["low"], score["high"])
        rows.append(f"  {name:<19} {shown(score['value'])}{within and f'  ({within})'}")
    if cut := task.get("cut"):
        shots += f", {cut:,} of the prompts without their beginning, which the model has no positions for"
    return [f"{task['name']}  {counted(task['items'], 'item')}{shots}; contamination: {task['contamination']}", *rows]


def generate(args: argparse.Namespace) -> Any:
    from bessemer.train.generation import complete

    sampling = _sampling(args)
    store, tokenizer, model = runs.open_model(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    _report_spelled(prompt, tokenizer)
    text = complete(model, tokenizer, prompt, args.max_tokens, sampling, store.framing, store.ends)
    if not args.json:
        print(prompt + text)
    return {"prompt": prompt, "text": text}


def _report_spelled(text: str, tokenizer: Tokenizer) -> None:
    for name in tokenizer.special_in(text):
        say(f"  {name!r} in the text is read as the special token, as in transformers".replace("[", r"\["))


def chat(args: argparse.Namespace) -> Any:
    from bessemer.cli.chat import Chat, Template
    from bessemer.tokens.tokenizer.chat import chat_template

    sampling = _sampling(args)
    store, tokenizer, model = runs.open_model(args)
    template = Template.choose(args.template, store.folder, tokenizer)
    conversation = Chat(model, tokenizer, template, sampling, args.system, store.ends)
    _report_spelled(args.system or "", tokenizer)
    if args.template is None and chat_template(store.folder) is None:
        say("  this model was not trained on conversations: it continues a text that looks like one (--template plain)")
    shown = not args.json
    interactive = shown and sys.stdin.isatty()
    if interactive:
        print("Write a message and press Enter; an empty line or Ctrl-D ends the conversation.")
    for message in iter(lambda: _read_message("> " if interactive else ""), None):
        if not message and interactive:
            break
        if not message:  # an empty line between messages that are read from a file
            continue
        forgotten = conversation.num_forgotten
        _report_spelled(message, tokenizer)
        try:
            for piece in conversation.reply(message, args.max_tokens):
                if shown:
                    print(piece, end="", flush=True)
        except InputError as error:
            if not interactive:
                raise
            print(error)
        if shown:
            print()
        if conversation.num_forgotten > forgotten:
            messages = counted(conversation.num_forgotten, "message")
            say(f"  the first {messages} no longer fit into the context and are left out")
    return {"messages": conversation.messages}


def _read_message(prompt: str) -> str | None:
    """Return the next line of input; None at its end."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def import_model(args: argparse.Namespace) -> Any:
    from bessemer.export import import_model as imported
    from bessemer.run.directory import RunDirectory
    from bessemer.storage import hub

    text, commit = args.folder.removeprefix("hf:"), None
    source, name = Path(text), args.name or Path(text).resolve().name
    if args.folder.startswith("hf:") and hub.is_name(text):
        source = hub.fetch_model(text)
        commit, name = source.name, args.name or text.partition("@")[0].rpartition("/")[2]
    run = RunDirectory(Path(args.dir) / name)
    if not source.is_dir():
        raise InputError(
            f"{args.folder}: no such folder; give one with config.json, safetensors and tokenizer.json, or hf:ORG/NAME of the hub"
        )
    result = imported.import_model(source, run, name, args.dir, commit)
    compared = "" if result["logits_max_difference"] is None else (
        f": transformers' logits differ by {result['logits_max_difference']:.1e}"
        + (f", {result['greedy_tokens_equal']} greedy tokens equal" if result["greedy_tokens_equal"] else "")
    )  # fmt: skip
    say(f"[green]✓[/] {result['architecture']} of {result['model_size']} in {run.path}{compared}")
    if result["note"]:
        say(f"  note: {result['note']}")
    return {"run": run.path, **result}


def export(args: argparse.Namespace) -> Any:
    from bessemer.workflow import stages

    session, resolved = runs.open_trained(args)
    facts = stages.export(session, resolved, Path(args.folder), runs.weights(args, session), args.to, args.dtype)
    return {key: value for key, value in facts.items() if key != "inputs"}


def _sampling(args: argparse.Namespace) -> Sampling:
    """Return the sampling settings of the arguments. Raises InputError for invalid ones."""
    from bessemer.train.generation import Sampling

    if args.max_tokens < 1:
        raise InputError(f"--max-tokens {args.max_tokens}: not a number of tokens; give 1 or more")
    return Sampling(args.temperature, args.top_k, args.top_p, args.seed)
