import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import os
import pickle
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from PIL import Image
from torchvision.datasets import CIFAR10

from tests import simulator

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

Run = Callable[..., Any]


@pytest.fixture(name="example", scope="module")
def _example() -> Iterator[ModuleType]:
    """The example as a module; its folder is no package, as a script's is not."""
    # autograd counts the accelerators at a process's first backward pass: one that is loaded later cannot have any.
    with contextlib.suppress(simulator.SimulatorUnavailable):  # then the test that needs it is skipped
        simulator.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("cifar10")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The example's choice of a number of threads ends with the test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="run")
def _run(example: ModuleType, tmp_path: Path) -> Run:
    """A call of the example's main with options, its plot in the test's folder."""

    def run(*options: object) -> Any:
        return example.main(["--plot", str(tmp_path / "plot.png"), *map(str, options)])

    return run


def make_tree(root: Path, train: int = 24, test: int = 4) -> Path:
    """Two classes of images, not all 32 pixels wide, and a file that is none."""
    for part, count in (("train", train), ("test", test)):
        for label, name in enumerate(("dark", "light")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                side = 32 if i % 3 else 40
                pixels = np.random.default_rng(i).integers(
                    120 * label, 120 * label + 120, (side, 32, 3), dtype=np.uint8
                )
                Image.fromarray(pixels).save(folder / f"{i}.{'jpg' if i % 2 else 'png'}")
    (root / "train" / "dark" / "README.txt").write_text("not an image")
    return root


@pytest.fixture(name="tree", scope="module")
def _tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images that no test changes."""
    return make_tree(tmp_path_factory.mktemp("images"))


@pytest.fixture(name="no_network")
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request fails as it does on a machine without a network."""

    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


OPTIONS = ("--device", "cpu", "--epochs", 2, "--batch-size", 10)


@pytest.fixture(name="expected", scope="module")
def _expected(example: ModuleType, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with OPTIONS, for others to be compared with."""
    plot = tmp_path_factory.mktemp("expected") / "plot.png"
    return example.main([str(word) for word in (*OPTIONS, "--data", tree, "--plot", plot)])


class TestCommandLine:
    """The example as a user starts it."""

    def start(self, folder: Path, *options: object) -> "subprocess.CompletedProcess[str]":
        """Run the script in a folder of its own."""
        search_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, str(EXAMPLES / "cifar10.py"), *map(str, options)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": search_path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def test_a_run_ends_with_its_accuracy_and_leaves_a_png(self, tree: Path, tmp_path: Path) -> None:
        """Status 0, no noise, the accuracy in the last line, and the curves in the current folder."""
        ended = self.start(tmp_path, "--data", tree, "--device", "cpu", "--steps", 3, "--batch-size", 16)
        assert (ended.returncode, ended.stderr) == (0, "")
        lines = ended.stdout.splitlines()
        assert re.fullmatch(r"test accuracy \d{2,3}\.\d\d %", lines[-1])
        assert f"data: 48 + 8 images of {tree}" == lines[0]
        assert "curves: cifar10.png" in lines
        assert (tmp_path / "cifar10.png").read_bytes().startswith(PNG_SIGNATURE)

    def test_a_bad_option_ends_it_before_it_starts(self, tmp_path: Path) -> None:
        """Status 2, one line with the reason after the usage, no traceback, and no file."""
        ended = self.start(tmp_path, "--epochs", -1)
        assert (ended.returncode, ended.stdout) == (2, "")
        last = ended.stderr.splitlines()[-1]
        assert last == "cifar10.py: error: argument --epochs: must be an integer from 1 upwards, got '-1'"
        assert "Traceback" not in ended.stderr
        assert list(tmp_path.iterdir()) == []


class TestSameResults:
    """What a run gives depends on the seed, and not on how its batches come."""

    # From Python 3.12 on a fork beside running threads, which torch has, is warned of.
    @pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize(
        "options",
        [("--no-prefetch",), ("--workers", 2), ("--workers", 2, "--no-prefetch")],
        ids=["plain", "workers", "plain-workers"],
    )
    def test_on_the_cpu(self, run: Run, tree: Path, expected: Any, options: tuple[object, ...]) -> None:
        """Losses and accuracies are equal bit for bit, with workers and without, prefetched or not."""
        result = run(*OPTIONS, "--data", tree, *options)
        assert (expected.losses, expected.accuracies) == (result.losses, result.accuracies)

    def test_other_seeds_differ(self, run: Run, tree: Path, expected: Any) -> None:
        """The seed does rule the run."""
        assert expected.losses != run(*OPTIONS, "--data", tree, "--seed", 1).losses

    @pytest.mark.usefixtures("sim")
    def test_on_an_accelerator(self, run: Run, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The simulated one is the default; look-ahead changes no loss on it, and its fixture finds no race."""
        options = ("--steps", 4, "--batch-size", 16, "--workers", 0, "--data", tree)
        prefetched, plain = run(*options), run(*options, "--device", "sim", "--no-prefetch")
        assert len(plain.losses) == 4
        assert (plain.losses, plain.accuracies) == (prefetched.losses, prefetched.accuracies)
        assert "device: sim:0, with CUDAPrefetcher" in capsys.readouterr().out


class TestOptions:
    """What the options do."""

    def test_generated_images_can_be_learned(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        """Without --data images are generated, the output says so, and guessing (10 %) is left far behind."""
        result = run("--device", "cpu", "--steps", 100, "--batch-size", 64)
        assert result.accuracies[-1] > 0.3
        output = capsys.readouterr().out
        assert "data: 5,000 + 1,000 generated images, since no --data was given" in output
        assert f"test accuracy {100 * result.accuracies[-1]:.2f} %" == output.splitlines()[-1]

    @pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (3, 1), (5, 2)])
    def test_steps_end_the_run(self, run: Run, tree: Path, steps: int, epochs: int) -> None:
        """As many losses as steps, over as many epochs as they need, each tested at its end."""
        result = run("--device", "cpu", "--data", tree, "--steps", steps, "--batch-size", 16)
        lengths = [len(result.losses), len(result.accuracies), len(result.images_per_s)]
        assert [steps, epochs, epochs] == lengths

    def test_amp(self, run: Run, tree: Path) -> None:
        """Computing in bfloat16 gives other losses that are not far away."""
        options = ("--device", "cpu", "--data", tree, "--steps", 2, "--batch-size", 16)
        exact, rounded = run(*options).losses, run(*options, "--amp").losses
        assert exact != rounded
        assert exact == pytest.approx(rounded, rel=0.1)


class InterruptedRunError(Exception):
    """What ends a run in its middle."""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata with a newer torch
class TestCheckpoint:
    """A run that goes on from a checkpoint is the run that was not interrupted."""

    @pytest.fixture(autouse=True)
    def _torchdata(self) -> None:
        pytest.importorskip("torchdata")

    @pytest.fixture(name="interrupt")
    def _interrupt(self, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        """End the next run after so many checkpoints."""
        save = example.Checkpoints.save

        def interrupt(count: int) -> None:
            saves = itertools.count(1)

            def save_and_raise(*args: object) -> None:
                save(*args)
                if next(saves) == count:
                    raise InterruptedRunError

            monkeypatch.setattr(example.Checkpoints, "save", save_and_raise)

        return interrupt

    @pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize(
        "options",
        [(), ("--no-prefetch",), ("--workers", 2), ("--workers", 2, "--no-prefetch")],
        ids=["prefetch", "plain", "workers", "plain-workers"],
    )
    @pytest.mark.parametrize("step", [1, 2, 4, 5, 8], ids=["first", "middle", "last", "second-epoch", "end"])
    def test_the_same_run(
        self,
        run: Run,
        tree: Path,
        tmp_path: Path,
        expected: Any,
        interrupt: Callable[[int], None],
        step: int,
        options: tuple[object, ...],
    ) -> None:
        """Interrupted after any of its 2 epochs' 8 steps: the same losses and accuracies, and a throughput for both."""
        words = (*OPTIONS, "--data", tree, *options, "--checkpoint-every", 1)
        interrupt(step)
        with pytest.raises(InterruptedRunError):
            run(*words, "--checkpoint", tmp_path / "run")
        interrupt(0)
        resumed = run(*words, "--resume", tmp_path / "run")
        assert len(resumed.losses) == 8
        assert (resumed.losses, resumed.accuracies) == (expected.losses, expected.accuracies)
        assert len(resumed.images_per_s) == 2

    def test_the_same_weights(self, run: Run, tree: Path, tmp_path: Path, interrupt: Callable[[int], None]) -> None:
        """What the last checkpoints hold is equal, but for times; a run that has ended can be asked for its result."""
        words = (*OPTIONS, "--data", tree, "--checkpoint-every", 3)
        whole = run(*words, "--checkpoint", tmp_path / "whole")
        interrupt(2)
        with pytest.raises(InterruptedRunError):
            run(*words, "--checkpoint", tmp_path / "run")
        interrupt(0)
        run(*words, "--resume", tmp_path / "run")
        one, other = (torch.load(tmp_path / name, weights_only=True)["parts"] for name in ("whole", "run"))
        for name in ("model", "optimizer", "schedule"):
            torch.testing.assert_close(other[name], one[name], rtol=0, atol=0)
        assert whole == run(*words, "--resume", tmp_path / "whole")
        assert {path.name for path in tmp_path.iterdir()} == {"plot.png", "run", "whole"}

    def test_a_save_that_fails_leaves_the_old_file(
        self, run: Run, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The new file takes the old one's place when it is complete, and not before."""
        words = (*OPTIONS, "--data", tree)
        run(*words, "--checkpoint", tmp_path / "run")
        before = (tmp_path / "run").read_bytes()

        def fail(_: int) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            run(*words, "--checkpoint-every", 1, "--checkpoint", tmp_path / "run")
        assert (tmp_path / "run").read_bytes() == before


class TestPlace:
    """The device of a process that torchrun has started."""

    @pytest.mark.parametrize("name", [None, "sim"])
    def test_a_device_of_its_own(
        self, run: Run, tree: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str | None
    ) -> None:
        """LOCAL_RANK is its number, and there is nothing on device 0: no memory is ever allocated there."""
        monkeypatch.setenv("LOCAL_RANK", "1")
        seen = []
        monkeypatch.setattr(sys.modules["cifar10"], "plot", lambda *args: seen.append(args[1]))
        for index in range(sim.DEVICE_COUNT):
            torch.accelerator.reset_peak_memory_stats(index)
        before = [torch.accelerator.max_memory_allocated(index) for index in range(sim.DEVICE_COUNT)]
        with torch.accelerator.device_index(0):
            run("--steps", 2, "--batch-size", 16, "--workers", 0, "--data", tree, *(["--device", name] if name else []))
        after = [torch.accelerator.max_memory_allocated(index) for index in range(sim.DEVICE_COUNT)]
        assert [a > b for a, b in zip(after, before, strict=True)] == [False, True]
        assert "on sim:1, with CUDAPrefetcher" in seen[0]


class TestErrors:
    """Bad input ends the run with a line that names the option, the value and the rule."""

    @pytest.fixture(name="message")
    def _message(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
        """The last line of a run that must end with status 2, before it printed or wrote anything."""

        def message(*options: object) -> str:
            with pytest.raises(SystemExit) as ended:
                run(*options)
            printed = capsys.readouterr()
            assert (ended.value.code, printed.out) == (2, "")
            assert not (tmp_path / "plot.png").exists()
            return printed.err.splitlines()[-1]

        return message

    @pytest.mark.parametrize(
        ("option", "value", "rule"),
        [
            ("--device", "toaster", "device must name a device such as 'cpu' or 'cuda:0'"),
            ("--epochs", "0", "must be an integer from 1 upwards"),
            ("--steps", "two", "must be an integer from 1 upwards"),
            ("--batch-size", "1.5", "must be an integer from 1 upwards"),
            ("--workers", "-1", "must be an integer from 0 upwards"),
            ("--seed", str(2**63), f"must be an integer from 0 to {2**63 - 1}"),
            ("--plot", "nowhere/plot.png", "must be a file that can be written"),
            ("--plot", "/proc/plot.png", "must be a file that can be written"),
            ("--checkpoint", "nowhere/run", "must be a file that can be written"),
            ("--resume", "nowhere/run", "must be a file that can be written"),
            ("--checkpoint-every", "0", "must be an integer from 1 upwards"),
        ],
    )
    def test_values(self, message: Callable[..., str], option: str, value: str, rule: str) -> None:
        """Values out of range and of the wrong type."""
        assert message(option, value).endswith(f"error: argument {option}: {rule}, got {value!r}")

    @pytest.mark.parametrize(
        ("environment", "options", "line"),
        [
            (
                {"LOCAL_RANK": "1", "WORLD_SIZE": "2"},
                ("--device", "cpu:1"),
                "--device: must be without a number under torchrun, where LOCAL_RANK is each process's own",
            ),
            (
                {"LOCAL_RANK": "0", "WORLD_SIZE": "3"},
                ("--device", "cpu", "--batch-size", 10),
                "--batch-size: must be a multiple of the number of processes, 3",
            ),
        ],
        ids=["device", "batch-size"],
    )
    def test_several_processes(
        self,
        message: Callable[..., str],
        monkeypatch: pytest.MonkeyPatch,
        environment: dict[str, str],
        options: tuple[object, ...],
        line: str,
    ) -> None:
        """What is allowed to one process only, before there is any connection to others."""
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert message(*options).endswith(f"error: argument {line}, got {options[-1]!r}")

    @pytest.mark.usefixtures("sim")
    def test_more_processes_than_devices(self, message: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
        """Each must have a device of its own."""
        monkeypatch.setenv("LOCAL_RANK", "2")
        line = message("--device", "sim")
        rule = "must have one device for each process of this machine, got 2 for LOCAL_RANK 2"
        assert line.endswith(f"error: argument --device: {rule}")

    @pytest.mark.parametrize("option", ["--checkpoint", "--resume"])
    def test_one_file_for_two(self, message: Callable[..., str], tmp_path: Path, option: str) -> None:
        """The plot would replace the checkpoint."""
        pytest.importorskip("torchdata")
        path = str(tmp_path / "plot.png")
        rule = f"argument --plot: must be another file than that of {option}, got {path!r}"
        assert message(option, path).endswith(f"error: {rule}")

    def test_batch_without_enough_images(self, message: Callable[..., str], tree: Path) -> None:
        """Batches are full ones."""
        line = message("--device", "cpu", "--data", tree, "--batch-size", 49)
        assert line.endswith("argument --batch-size: must be at most 48, the number of images to learn from, got 49")

    @pytest.mark.parametrize("option", ["--checkpoint", "--resume"])
    def test_checkpoint_without_torchdata(
        self, message: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
    ) -> None:
        """It is optional; the line says what to install."""
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        line = message("--device", "cpu", option, tmp_path / "run")
        rule = "must be left out where torchdata is not installed (pip install torchdata)"
        assert line.endswith(f"error: argument {option}: {rule}")

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            ("missing", "must be a file that can be read, got {path!r}: No such file or directory"),
            ("text", "must be a checkpoint of this example, got {path!r}, which is none"),
            ("empty", "must be a checkpoint of this example, got {path!r}, which is none"),
            ("cut", "must be a checkpoint of this example, got {path!r}, which is none"),
            ("cut short", "must be a checkpoint of this example, got {path!r}, which is none"),
            ("foreign", "must be a checkpoint of this example, got {path!r}, which is none"),
            ("list", "must be a checkpoint of this example, got {path!r}, which is none"),
            (
                "other seed",
                "must be a checkpoint of a run like this one, with --seed 0, got {path!r} of one with --seed 1",
            ),
            (
                "other classes",
                (
                    "must be a checkpoint of a run like this one, with classes ['dark', 'light'], "
                    "got {path!r} of one with classes ['black', 'light']"
                ),
            ),
        ],
    )
    def test_resume(
        self,
        run: Run,
        message: Callable[..., str],
        capsys: pytest.CaptureFixture[str],
        tree: Path,
        tmp_path: Path,
        kind: str,
        reason: str,
    ) -> None:
        """Files that are no checkpoint, and one of another run."""
        pytest.importorskip("torchdata")
        path = tmp_path / "run"
        words = ("--device", "cpu", "--data", tree, "--batch-size", 16, "--steps", 1)
        if kind in ("cut", "cut short", "other seed", "other classes"):
            other = make_tree(tmp_path / "other")
            if kind == "other classes":
                for part in ("train", "test"):
                    (other / part / "dark").rename(other / part / "black")
            seed = int(kind == "other seed")
            run(*words, "--data", other, "--seed", seed, "--checkpoint", path)
            (tmp_path / "plot.png").unlink()
            capsys.readouterr()
        if kind.startswith("cut"):
            path.write_bytes(path.read_bytes()[: -100 if kind == "cut" else 20_000])
        if kind in ("text", "empty"):
            path.write_text("weights" * (kind == "text"))
        if kind in ("foreign", "list"):
            torch.save({"model": {}} if kind == "foreign" else [1], path)
        assert message(*words, "--resume", path).endswith(f"error: argument --resume: {reason.format(path=str(path))}")

    @pytest.mark.usefixtures("no_network")
    @pytest.mark.parametrize("exists", [True, False], ids=["empty", "missing"])
    def test_no_images_and_no_network(self, message: Callable[..., str], tmp_path: Path, exists: bool) -> None:
        """A failed download is the reason given; no folder is left behind, and none is taken away."""
        folder = tmp_path / "images"
        if exists:
            folder.mkdir()
        line = message("--data", folder)
        assert "argument --data: must be a folder with images as train/<class>/*" in line
        assert f"got {str(folder)!r}" in line
        assert "no network" in line
        assert exists == folder.exists()

    @pytest.mark.usefixtures("no_network")
    def test_images_elsewhere(self, message: Callable[..., str], tree: Path) -> None:
        """A folder with images in another arrangement is not one to download into."""
        line = message("--data", tree / "train")
        assert "argument --data: must hold images as train/<class>/* and test/<class>/*, got " in line
        assert re.search(r" with (dark|light)/\S+$", line)

    def test_file(self, message: Callable[..., str], tmp_path: Path) -> None:
        """A file is no folder."""
        file = tmp_path / "images.zip"
        file.touch()
        assert message("--data", file).endswith(f"argument --data: must be a folder, got the file {str(file)!r}")

    @pytest.mark.parametrize(
        ("remove", "reason"),
        [
            ("test", "test"),
            ("test/*", "Couldn't find any class folder"),
            ("train/light/*", "no valid file for the classes light"),
            ("test/light", "only one of them has ['light']"),
            ("*/light", "two or more classes"),
        ],
    )
    def test_incomplete_tree(self, message: Callable[..., str], tmp_path: Path, remove: str, reason: str) -> None:
        """A part, its classes or a class's images are missing."""
        tree = make_tree(tmp_path / "images", train=2, test=2)
        for path in tree.glob(remove):
            path.rename(tmp_path / "-".join(path.relative_to(tree).parts))
        line = message("--data", tree)
        assert "argument --data: must hold images as train/<class>/* and test/<class>/*" in line
        assert f"got {str(tree)!r}" in line
        assert reason in line

    @pytest.mark.parametrize("kept", [0, 100, 300], ids=["empty", "head", "cut"])
    def test_broken_image(self, message: Callable[..., str], tmp_path: Path, kept: int) -> None:
        """An image that cannot be read is named, before training gets to it."""
        tree = make_tree(tmp_path / "images", train=2, test=2)
        broken = tree / "test" / "light" / "1.jpg"
        broken.write_bytes(broken.read_bytes()[:kept])
        assert f"argument --data: must hold images that can be read, got {str(broken)!r}: " in message("--data", tree)


class TestImages:
    """What the sets hold."""

    def test_generated(self, example: ModuleType) -> None:
        """CIFAR's shape and ten classes of one size; the seed rules all of it; no image is in both sets."""
        one, same, other = (example.generate(seed, train=100, test=50) for seed in (0, 0, 1))
        images, labels = one.train.tensors
        assert ((100, 3, 32, 32), torch.uint8) == (images.shape, images.dtype)
        assert labels.bincount().tolist() == [10] * 10
        assert torch.equal(images, same.train.tensors[0])
        assert not torch.equal(images, other.train.tensors[0])
        assert not torch.equal(images[:50], one.test.tensors[0])

    def test_tree(self, example: ModuleType, tree: Path) -> None:
        """Images of any size become uint8 of 32 by 32 pixels, numbered by class."""
        data = example.load(tree, example.Group(0, 1, 0))
        assert data.classes == ["dark", "light"]
        assert {((3, 32, 32), torch.uint8)} == {(tuple(image.shape), image.dtype) for image, _ in data.train}
        assert [label for _, label in data.train] == [0] * 24 + [1] * 24

    @pytest.mark.usefixtures("no_network")
    def test_cifar10(self, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A root as torchvision leaves it after a download is read, without asking the network."""
        folder = tmp_path / CIFAR10.base_folder
        folder.mkdir()

        def write(name: str, content: dict[str, Any]) -> str:
            data = pickle.dumps(content)
            (folder / name).write_bytes(data)
            return hashlib.md5(data, usedforsecurity=False).hexdigest()

        pixels = np.arange(12 * 3072, dtype=np.int64).astype(np.uint8).reshape(12, 3072)
        batch = {"data": pixels, "labels": [i % 10 for i in range(12)]}
        monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", write("data_batch_1", batch)]])
        monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", write("test_batch", batch)]])
        names = {"label_names": [f"class {i}" for i in range(10)]}
        monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": write("batches.meta", names)})
        assert len(run("--device", "cpu", "--data", tmp_path, "--epochs", 1, "--batch-size", 4).losses) == 3


class TestPrepare:
    """What happens to a batch on the device."""

    def test_flips_image_by_image(self, example: ModuleType) -> None:
        """Each image is mirrored or not, as the table says, from the epoch's beginning on."""
        flips = torch.tensor([[False, True, True], [True, False, True]])
        images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
        labels = torch.arange(3)
        plain, prepare = example.Prepare(torch.device("cpu")), example.Prepare(torch.device("cpu"), flips)
        as_it_is, mirrored = plain((images, labels))[0], plain((images.flip(-1), labels))[0]
        for epoch in (0, 1):
            prepare.start(epoch)
            parts = [prepare((images[:2], labels[:2]))[0], prepare((images[2:], labels[2:]))[0]]
            expected = torch.where(flips[epoch][:, None, None, None], mirrored, as_it_is)
            assert torch.equal(expected, torch.cat(parts))

    def test_normalises(self, example: ModuleType) -> None:
        """From uint8 to float32 with CIFAR's mean at zero, and its deviation as the unit."""
        grey = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
        images, _ = example.Prepare(torch.device("cpu"))((grey, torch.zeros(1)))
        batches = sys.modules["cifar10_batches"]
        expected = (1 - torch.tensor(batches.MEAN)) / torch.tensor(batches.STD)
        torch.testing.assert_close(images[0, :, 0, 0], expected)
