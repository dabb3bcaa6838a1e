"""Memory depends on the split of the work, not on the input: text larger than the limit is processed within the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corpus_samples import prose

TEXT_BYTES = 256 << 20
LIMIT_BYTES = 192 << 20
"""Limit of one process, without mapped library files, of which kernels count different numbers of pages."""

PROGRAM = """
import sys
from pathlib import Path
from bessemer.corpus import partition, pipeline, publish
from bessemer.corpus.readers import parts
from bessemer.recipe import parse
from bessemer.run.directory import RunDirectory

parts.PART_BYTES = 4 << 20
partition.PARTITION_BYTES = (8 << 20, 8 << 20)
partition.BUCKET_BYTES = 8 << 20
publish.ROW_GROUP_BYTES = 2 << 20
done = pipeline.build(parse(Path(sys.argv[1]).read_text(), "test"), RunDirectory(Path(sys.argv[2])))
# Not ru_maxrss, which a process inherits from the one that started it.
status = dict(line.split()[:2] for line in open("/proc/self/status") if line.startswith(("VmHWM", "RssFile")))
print(done["documents_in"], done["documents_kept"], int(status["VmHWM:"]) - int(status["RssFile:"]))
"""


@pytest.mark.long
@pytest.mark.usefixtures("cold")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_text_larger_than_the_limit_is_processed_within_it(data: Path, tmp_path: Path) -> None:
    base = [prose(number, 4000).replace("\n", "NEWLINE") for number in range(40)]
    documents = written = 0
    with open(data / "a.jsonl", "w") as file:
        while written < TEXT_BYTES:
            # A cheap way to make different texts: the words stay, a number goes into every line.
            text = base[documents % len(base)].replace("NEWLINE", f" {documents}\\n")
            written += file.write('{"text": "' + text + '"}\n')
            documents += 1
    (tmp_path / "recipe.toml").write_text(
        "[run]\nname = 't'\n[model]\ndepth = 2\n[corpus]\nworkers = 1\n[corpus.dedup]\nminhash = false\n"
        f"[[corpus.sources]]\nname = 's'\nformat = 'jsonl'\npaths = [{json.dumps(str(data))}]\n"
    )
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / "recipe.toml"), str(tmp_path / "run")]
    # Allocators that keep freed memory are off: they add 40 to 90 MB that vary between runs.
    allocator = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **allocator}
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    *said, kilobytes = done.stdout.split()
    assert said == [str(documents), str(documents)]
    peak = int(kilobytes) << 10
    assert peak <= LIMIT_BYTES, f"{peak >> 20} MiB of {LIMIT_BYTES >> 20}"
    print(f"{peak >> 20} MiB at the peak, {written >> 20} MiB of input")
