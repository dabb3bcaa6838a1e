"""MkDocs hooks that add to the site the pages from outside docs/ and those generated from source."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

sys.path.insert(0, str(Path(__file__).parent))
import links
import reference

ROOT = Path(__file__).parents[2]
MADE = re.compile(r"^<!-- made by the site: (\w+) -->$", re.MULTILINE)

FROM_OTHER_HOSTS = re.compile(
    r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(?:https?:)?//'
)


def on_config(config: Any) -> Any:
    """Make anchors as code hosts do."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of other folders and those of the API."""
    for source, page in links.FROM_ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, text in reference.api_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with generated parts filled in and links changed to pages of the site."""
    return links.prepared(MADE.sub(lambda marker: reference.MADE[marker[1]](), markdown), page.file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> None:
    """Fail the build if the page loads anything from other hosts or has a mark of a generated part left."""
    for found in FROM_OTHER_HOSTS, re.compile("made by the site"):
        if match := found.search(output):
            raise PluginError(f"{page.file.src_uri}: {match[0]}")
