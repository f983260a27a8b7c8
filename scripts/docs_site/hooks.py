"""What MkDocs asks for while it builds the site: pages from outside docs/, the API's pages, links, formulas."""

from __future__ import annotations

from typing import Any

import api
import formulas
import links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the API's pages to the navigation, drop what is missing from it."""
    there = {*links.parts().values(), *api.pages()}
    config.nav = [entry for entry in (kept(entry, there) for entry in config.nav or []) if entry]
    return config


def kept(entry: Any, there: set[str]) -> Any:
    """An entry of the navigation without the pages that are missing; None where nothing is left of it."""
    if isinstance(entry, str):
        return entry if entry in there else None
    (name, content), *_ = entry.items()
    if isinstance(content, str):
        return entry if content in there else None
    if api.INDEX in content:
        return {name: [api.INDEX, *({title: page} for page, title in api.titles().items())]}
    inside = [one for one in (kept(one, there) for one in content) if one]
    return {name: inside} if inside else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/, or is no Markdown."""
    for path, page in links.parts().items():
        if page not in api.pages() and files.get_file_from_path(page) is None:
            made: dict[str, Any] = {"content": links.text(path)} if page.endswith(".md") else {}
            files.append(File.generated(config, page, **made or {"abs_src_path": str(links.ROOT / path)}))
    for page, content in api.pages().items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where their targets are in the site."""
    homes = {where: path for path, where in links.parts().items()}
    path = homes.get(page.file.src_uri, "")
    return links.rewritten(markdown, path) if path.endswith(links.PROSE) else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Typeset the formulas of a page; pages that show a file of the repository are left as they are."""
    return html if page.file.src_uri.startswith("source/") else formulas.typeset(html)
