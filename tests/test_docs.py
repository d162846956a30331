"""What the documentation shows runs, on the CPU and on the simulated accelerator; what it names is there."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

DOCS = ROOT / "docs"
TEXTS = ["README.md", "CONTRIBUTING.md", *sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md"))]
# What the pages import that neither the library nor a plain test run needs.
NEEDS = {
    "docs/how-to/frameworks.md": [
        "accelerate",
        "lightning",
        "ray.train",
        "tensordict",
        "tokenizers",
        "torch_geometric",
        "torchdata",
        "transformers",
        "webdataset",
    ],
    "docs/how-to/resume.md": ["torchdata"],
    "docs/how-to/distributed.md": ["torchdata"],
    "docs/moving-tensors.md": ["matplotlib"],
}
# Other people's code, which does not know the simulated accelerator.
ON_THE_CPU_ONLY = {"docs/how-to/frameworks.md", "docs/how-to/distributed.md"}
# A page should not show what the library warns of.
STRICT = """
import warnings
import prefetch
warnings.simplefilter("error", prefetch.PrefetchWarning)
"""
# What the blocks of the README leave out: things of the reader's.
README_NAMES = """
import torch
from prefetch import CUDAPrefetcher

batches_seen = []

def model(images):
    batches_seen.append(images)
    return images.sum(dim=1)

def criterion(scores, labels):
    batches_seen.append(labels)
    return (scores - labels).square().mean()

data = torch.utils.data.TensorDataset(torch.arange(1800.0).view(600, 3), torch.arange(600))
loader = torch.utils.data.DataLoader(data, batch_size=256, pin_memory=torch.accelerator.is_available())
"""


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


WITH_CODE = [page for page in TEXTS if blocks(page, "python")]
COMMANDS = [
    (page, line.split("  #")[0].rstrip())
    for page in TEXTS
    for block in blocks(page, "console")
    for line in block.splitlines()
    if re.search(r"cuda-prefetcher |python |torchrun ", line)
]


def run(program: str, folder: Path, *prefix: str) -> subprocess.CompletedProcess[str]:
    """A program as the module ``page`` in an empty folder, with the library on its path."""
    (folder / "page.py").write_text(program)
    return subprocess.run(
        [sys.executable, *prefix, "page"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def program_of(page: str) -> str:
    """All Python blocks of a page, one after the other, in one program."""
    for package in NEEDS.get(page, []):
        pytest.importorskip(package)
    return "\n".join([STRICT, README_NAMES if page == "README.md" else "", *blocks(page, "python")])


@pytest.mark.parametrize("page", WITH_CODE)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    """The blocks of a page run where there is no accelerator, and what they assert holds."""
    result = run(program_of(page), tmp_path, "-m")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in ON_THE_CPU_ONLY])
def test_blocks_run_on_an_accelerator(page: str, tmp_path: Path, simulator_unavailable: str | None) -> None:
    """The blocks of a page run where there is an accelerator, without a race, and what they assert holds."""
    if simulator_unavailable is not None:
        pytest.skip(simulator_unavailable)
    result = run(program_of(page), tmp_path, "-m", "tests.simulator")
    assert result.returncode == 0, result.stderr


def version(diff: str, sign: str) -> str:
    """The old (``-``) or the new (``+``) text of a diff, for a machine without a GPU and with two cores."""
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)]
    return "\n".join(lines).replace('"cuda"', '"cpu"').replace("num_workers=8", "num_workers=0")


def test_readme_diff(tmp_path: Path) -> None:
    """The loop of the README runs before and after the change that it shows, and sees the same batches."""
    (diff,) = blocks("README.md", "diff")
    old, new = version(diff, "-"), version(diff, "+")
    assert "CUDAPrefetcher" in new
    assert "CUDAPrefetcher" not in old
    parts = [f"{README_NAMES}\n{text}\n{name} = batches_seen" for name, text in (("before", old), ("after", new))]
    same = "assert len(before) == 6\nassert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))"
    result = run("\n".join([*parts, same]), tmp_path, "-m")
    assert result.returncode == 0, result.stderr


@functools.cache
def help_of(*command: str) -> str:
    """What a command says of its options."""
    result = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def parts_of(line: str) -> list[list[str]]:
    """The commands of a shell line, without comments and variables for their environment."""
    parts = [shlex.split(part) for part in re.split(r"&&|;|\|", line)]
    return [[word for word in part if not re.match(r"[A-Z_]+=", word)] for part in parts]


def is_there(module: str) -> bool:
    """Whether ``python -m`` finds it."""
    return importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{Path(page).stem}: {line}" for page, line in COMMANDS])
def test_commands_exist(page: str, line: str) -> None:
    """A command that is shown names a file or a module of the project, and options that its help lists."""
    checked = 0
    for words in parts_of(line):
        if words[:1] == ["cuda-prefetcher"]:
            command, options = ["-m", "prefetch", *words[1:2]], words[2:]
        elif words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("prefetch", "benchmarks", "tests"):
            assert is_there(words[2]), words[2]
            command, options = ["-m", words[2]], words[3:]
        elif words[:2] == ["python", "-m"]:
            assert words[2] in ("venv", "sphinx"), "a module that is not the project's"
            checked += 1
            continue
        elif script := next((word for word in words if word.endswith(".py")), None):
            assert (ROOT / script).is_file(), script
            command, options = [script], words[words.index(script) + 1 :]
        else:
            continue  # of the shell, of pip, ...
        checked += 1
        names = [word.split("=")[0] for word in options if word.startswith("-")]
        missing = [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", help_of(*command))]
        assert missing == []
    assert checked > 0


@pytest.mark.parametrize("page", TEXTS)
def test_names_in_the_text(page: str) -> None:
    """Modules and files that a sentence tells to run are there."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    modules = re.findall(r"`python -m ((?:prefetch|benchmarks|tests)[\w.]*)", text)
    assert [module for module in modules if not is_there(module)] == []
    files = re.findall(r"`(?:python )?((?:examples|benchmarks|tests|docs|prefetch)/[\w/.-]+\.\w+)", text)
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("page", TEXTS)
def test_links_resolve(page: str) -> None:
    """Each relative link and picture leads to a file, and its anchor to a heading."""
    broken = []
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(file: Path) -> set[str]:
    """What a link can name in a page: its headings, written as GitHub and MyST do, and its targets."""
    text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def test_site_builds(tmp_path: Path) -> None:
    """Sphinx builds all pages without a warning: each reference leads somewhere, and each page is in a table."""
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    options = ["-n", "-W", "--keep-going", "-q", "-E", "-d", str(tmp_path / "doctrees")]
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "html")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.stderr == ""
    assert result.returncode == 0
    page = (tmp_path / "html" / "benchmarks.html").read_text()
    measured = json.loads((ROOT / "benchmarks" / "results" / "overlap.json").read_text())["rows"]
    first = re.search(r"<table.*?</table>", page, re.DOTALL)
    assert first is not None
    cells = re.findall(r"<td[^>]*><p>(.*?)</p></td>", first[0], re.DOTALL)
    assert cells[:: len(measured[0])] == [row["loop"] for row in measured]
    assert cells[1] == f"{measured[0]['copy 5 ms, compute 10 ms']:.2f}"


def test_results_as_text() -> None:
    """Figures are given with three digits, and text that Markdown would take for marks as it is."""
    for package in ("docutils", "sphinx"):
        pytest.importorskip(package)
    script = runpy.run_path(str(DOCS / "directives.py"))
    rows = [{"loop": "f(x_1) | *", "ratio": 1.0, "count": 3.0}, {"loop": "g", "ratio": 12.34, "us": 1234.5}]
    assert script["table"](rows) == [
        "| loop | ratio | count | us |",
        "| --- | ---: | ---: | ---: |",
        "| f(x\\_1) \\| \\* | 1.00 | 3 | - |",
        "| g | 12.3 | - | 1,234 |",
    ]
    assert script["record"]({"device": "simulated accelerator", "cores": 2}).startswith("**Simulated** on: ")
    assert script["record"]({"device": "Some GPU", "cores": 2}) == "Measured on: Some GPU; cores 2."


def test_figures_of_the_policies() -> None:
    """The table beside the explanation of the three policies has the figures that were measured."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "overlap.json").read_text())["rows"]
    text = (DOCS / "explanation" / "memory.md").read_text()
    table = text[text.index("| `memory=` | `prefetch_batches` |") :].split("\n\n")[0]
    shown, policy = {}, ""
    for line in table.splitlines()[2:]:
        name, ahead, *figures = (cell.strip() for cell in line.strip("|").split("|"))
        policy = name.strip('`"') or policy
        shown[f"CUDAPrefetcher, {policy}, prefetch_batches={ahead}"] = [float(figure) for figure in figures]
    assert shown == {
        row["loop"]: [round(value, 2) for name, value in row.items() if name != "loop"]
        for row in measured
        if row["loop"].startswith("CUDAPrefetcher")
    }


def test_diagrams_are_drawn() -> None:
    """The diagrams are what the script beside them draws."""
    script = runpy.run_path(str(DOCS / "diagrams" / "draw.py"))
    drawn = {f"{name}.svg": draw() for name, draw in script["DIAGRAMS"].items()}
    assert {file.name: file.read_text() for file in (DOCS / "diagrams").glob("*.svg")} == drawn


def test_all_public_names_are_documented() -> None:
    """The reference has every name that the package exports."""
    import prefetch

    page = (DOCS / "reference" / "api.md").read_text()
    documented = re.findall(r"^\.\. auto(?:class|function|exception):: (\w+)(?:\(\))?$", page, re.MULTILINE)
    assert sorted(documented) == prefetch.__all__
