"""About 25 MB of plain English from Debian packages, as a folder of text files.

    python benchmarks/pretrain_corpus.py corpus

Needs a Debian or Ubuntu with `apt-get` and `dpkg-deb`; nothing is installed. Prose (An Anarchist FAQ) and
manuals (Perl's, Git's), each under its own licence: the texts are fetched by whoever runs this and are no
part of the project. The file SOURCES says which versions came; losses are comparable between runs on one
folder only.
"""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

# package -> the files in it that are English text
PACKAGES = {
    "anarchism": "usr/share/doc/anarchism/html/*.html",
    "perl-doc": "usr/share/perl/*/pod/*.pod",
    "git-doc": "usr/share/doc/git-doc/**/*.txt",
}


class Text(HTMLParser):
    """The text of a page, a blank line between its paragraphs."""

    BLOCKS = ("p", "blockquote", "h1", "h2", "h3", "h4", "li", "div", "title")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(" ".join(data.split("\n")))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def text(self) -> str:
        paragraphs = (" ".join(p.split()) for p in "".join(self.parts).split("\n\n"))
        return "\n\n".join(p for p in paragraphs if p) + "\n"


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    versions = []
    with TemporaryDirectory() as folder:
        work = Path(folder)
        work.chmod(0o755)  # apt's sandbox user must be able to read it
        for package, pattern in PACKAGES.items():
            subprocess.run(["apt-get", "download", "-qq", package], cwd=work, check=True)
            archive = next(work.glob(f"{package}_*.deb"))
            versions.append(archive.name)
            subprocess.run(["dpkg-deb", "-x", archive, work / package], check=True)
            for path in sorted((work / package).glob(pattern)):
                text = path.read_text(encoding="utf-8", errors="replace")
                if path.suffix == ".html":
                    page = Text()
                    page.feed(text)
                    text = page.text()
                (out / f"{package}-{path.stem}.txt").write_text(text, encoding="utf-8")
    (out / "SOURCES").write_text("\n".join(versions) + "\n")
    size = sum(path.stat().st_size for path in out.glob("*.txt"))
    print(f"{out}: {len(list(out.glob('*.txt')))} files, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "corpus"))
