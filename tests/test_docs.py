"""The documentation: links that lead somewhere, and a site that builds without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perpend import cli

REPO = Path(__file__).resolve().parent.parent
PAGES = sorted([REPO / "README.md", *(REPO / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The ids that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[ \-]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_within_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        where = (page.parent / path).resolve() if path else page
        assert where.exists(), f"{page.name}: {target}"
        assert REPO in where.parents, f"{page.name}: {target} leaves the project"
        if anchor and where.suffix == ".md":
            assert anchor in anchors(where), f"{page.name}: {target}"


def test_every_page_and_every_study_is_listed() -> None:
    contents = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    home = (REPO / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (REPO / "docs").rglob("*.md"):
        assert f": {page.relative_to(REPO / 'docs').as_posix()}\n" in contents, (
            f"mkdocs.yml: nav lacks {page.name}"
        )
    for verb in sorted(set(cli.verbs.list_commands(None)) - {"models", "report"}):
        assert f"`{verb}`" in home, f"docs/index.md has no row for perpend {verb}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = shutil.which("mkdocs") or shutil.which("mkdocs", path=str(Path(sys.executable).parent))
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: pip install 'perpend[docs]'")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "-d", tmp_path], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "command-line.html").read_text(encoding="utf-8")
    assert "perpend attention" in page
    # Icons and code are local; only links a reader may follow point elsewhere.
    asked = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page)
    assert [url for url in asked if "canonical" not in url] == []
