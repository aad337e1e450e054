"""What the site does beyond mkdocs: links that leave docs/ on GitHub lead to the same things inside the site.

A page may show a picture of `../benchmarks/results` or of `../studies`, which is then copied into the site, and link to
`../CONTRIBUTING.md`, whose text is the page contributing.md. A page has a table of the mechanisms, made of their
docstrings, where it says `<!-- every mechanism -->`, all studies with their records where it says
`<!-- every study -->`, the help of all commands where it says `<!-- every command -->`, and a picture that
examples/draw_attention.py draws during the build where it says `<!-- picture: NAME -->`.

Formulas between dollars, in TeX, become MathML, which browsers draw by themselves: no script, no network.
"""

import functools
import html
import inspect
import re
import runpy
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert as mathml_of
from mkdocs.structure.files import File, Files

from polysketch.attention import MECHANISMS
from polysketch.cli import VERBS, flags_of
from polysketch.cli.help import help_of, subcommands_of
from polysketch.studies.page import page as page_of_studies

ROOT = Path(__file__).resolve().parents[1]
PICTURE = re.compile(r"!\[([^\]]*)\]\(\.\./((?:benchmarks|studies)/[^)\s]+\.png)\)")
DRAWN = re.compile(r"<!-- picture: ([\w-]+) -->")
DRAWN_FOLDER = ROOT / "build" / "pictures"
EVERY_MECHANISM = "<!-- every mechanism -->"
EVERY_STUDY = "<!-- every study -->"
EVERY_COMMAND = "<!-- every command -->"
FORMULA = re.compile(r'(?s)<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>')
_HELP_WIDTH = 88  # columns that a page shows without scrolling
PAGES = {"../CONTRIBUTING.md": "contributing.md", "../README.md": "index.md", "../CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config) -> Files:
    """Add the pictures that pages show."""
    pages = [generated(page.content_string) for page in files.documentation_pages()]
    shown = {name for markdown in pages for _, name in PICTURE.findall(markdown)}
    for name in sorted(shown):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    if any(DRAWN.search(page) for page in pages):
        for file in draw_pictures():
            files.append(File.generated(config, f"assets/{file.name}", abs_src_path=str(file)))
    return files


@functools.cache
def draw_pictures() -> list[Path]:
    """Draw the pictures of mechanisms from the mechanisms as they are now."""
    DRAWN_FOLDER.mkdir(parents=True, exist_ok=True)
    script = runpy.run_path(str(ROOT / "examples" / "draw_attention.py"))
    return [script[draw](DRAWN_FOLDER) for draw in ("draw_seen", "draw_remembered")]


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Lead links to where their targets are in the site, and write what is made of the code and of records."""
    markdown = generated(markdown)
    up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)
    # A picture leads to itself, for on a telephone it is small.
    markdown = PICTURE.sub(lambda found: f"[![{found[1]}]({up}{found[2]})]({up}{found[2]})", markdown)
    markdown = DRAWN.sub(
        lambda found: f"[![{found[1].replace('-', ' ')}]({up}assets/{found[1]}.png)]({up}assets/{found[1]}.png)",
        markdown,
    )
    for outside, inside in PAGES.items():
        markdown = markdown.replace(f"]({outside})", f"]({up}{inside})")
    return markdown


def on_page_content(content: str, page, config, files) -> str:
    """Formulas as MathML; arithmatex has marked them."""
    return FORMULA.sub(lambda found: typeset(html.unescape(found[2]), block=found[1] == "div"), content)


def typeset(formula: str, *, block: bool) -> str:
    """A formula in TeX as MathML, in a line of text or in a line of its own."""
    return mathml_of(formula.strip(), display="block" if block else "inline")


def generated(markdown: str) -> str:
    """With the table of mechanisms, the studies and the commands."""
    marks = {EVERY_MECHANISM: mechanism_table, EVERY_STUDY: every_study, EVERY_COMMAND: every_command}
    for mark, made in marks.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


@functools.cache
def every_study() -> str:
    """As the records have it."""
    return page_of_studies(ROOT / "studies", "../studies")


@functools.cache
def every_command() -> str:
    """What `polysketch COMMAND --help` shows, a heading for each."""
    shown = []
    for verb in VERBS:
        flags_class = flags_of(verb)
        for name in ("", *subcommands_of(flags_class)):
            command = f"polysketch {verb} {name}".strip()
            text = help_of(f"polysketch {verb}", flags_class, [name, "--help"], width=_HELP_WIDTH)
            shown.append(f"## {command}\n\n```text\n{text}\n```")
    return "\n\n".join(shown)


def mechanism_table() -> str:
    """A row for every mechanism: its name, its class, and the first line of what its docstring says."""
    rows = ["| mechanism | class | what it computes |", "|---|---|---|"]
    for name, kind in MECHANISMS.items():
        formula = (inspect.getdoc(kind) or "").splitlines()[0].replace("|", "\\|").replace("<", "&lt;")
        rows.append(f"| `{name}` | `attention.{kind.__name__}` | {formula} |")
    return "\n".join(rows)
