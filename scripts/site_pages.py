"""A hook of mkdocs: adds the pages at the root of the repository and a page with all examples, and rewrites links to
files that are not pages. mkdocs.yml names it; it reads files of the repository and writes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
AT_THE_ROOT = ("TOUR.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), ROOT / "examples" / "stack.yaml"])
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)")
HEAD = """# Examples

All files of `examples/`. The first lines of a file say what it does; `--help` lists its options.
"""


def gallery() -> str:
    """The page with all examples."""
    parts = [HEAD]
    for path in EXAMPLES:
        language = "python" if path.suffix == ".py" else "yaml"
        parts.append(f"## {path.name}\n\n````{language}\n{path.read_text()}````\n")
    return "\n".join(parts)


def rewritten(text: str, at_the_root: bool) -> str:
    """The text of a page with links that work in the site."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or not target:
            return match[0]
        path = target.removeprefix("docs/") if at_the_root else target.removeprefix("../")
        if path.startswith("examples/") and (ROOT / path) in EXAMPLES:
            return f"[{words}](examples.md#{path.removeprefix('examples/').replace('.', '').lower()})"
        if path.endswith(".md") and path != "README.md":
            return f"[{words}]({path}{anchor})"
        return f"`{path}`"  # a file of the repository: its name is enough

    return LINK.sub(link, text)


def on_files(files: Files, config: Any) -> Files:
    """Adds pages that are no files of docs/."""
    for name in AT_THE_ROOT:
        files.append(File.generated(config, name, content=rewritten((ROOT / name).read_text(), True)))
    files.append(File.generated(config, "examples.md", content=gallery()))
    return files


def on_page_markdown(markdown: str, page: Any, **_more: Any) -> str:
    """Rewrites the links of a page of docs/."""
    return markdown if page.file.generated_by else rewritten(markdown, False)
