"""[corpus.extract] of the recipe: from a page to its text."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bessemer.recipe.section import Positive, Section, Share


class Extract(Section):
    """How text is taken out of web pages (formats html and warc)."""

    engine: Literal["resiliparse", "trafilatura"] = Field(
        "resiliparse",
        description="Library that finds the main content: resiliparse, or trafilatura (removes more boilerplate, some "
        "30 times slower; pip install 'bessemer[trafilatura]').",
    )
    main_content: bool = Field(
        True, description="Take the main content only; false keeps menus, footers and all other visible text."
    )
    max_list_link_share: Share = Field(
        0.5,
        description="A bulleted list stays when no more than this share of its characters is link text; above it is "
        "taken for a menu (resiliparse).",
    )
    max_undecodable_share: Share = Field(
        0.01,
        description="Pages in which no more than this share of the characters cannot be decoded keep the others; "
        "more and the page is rejected (not_utf8).",
    )
    max_html_bytes: Positive | None = Field(
        None,
        description="Longer pages are rejected unread (too_long); unset: 8 MiB, and 256 KiB for trafilatura, which is "
        "about a second of work.",
    )
