"""A run that is to be started: its file, the options of its command, and the nodes."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from meshwright.errors import LaunchError
from meshwright.ir.nodes import Nodes
from meshwright.ir.run import Run


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is to be started. ``arguments``: the dotted options of the command, which ``run`` has already.
    ``trust``: the user trusts the run file (``--trust``)."""

    run: Run
    file: Path
    arguments: tuple[str, ...] = ()
    trust: bool = False

    @property
    def nodes(self) -> Nodes:
        """The nodes of the run."""
        return self.run.nodes

    @property
    def directory(self) -> Path:
        """The run's directory, which every node must see."""
        return Path(self.run.train.directory).absolute()

    @property
    def name(self) -> str:
        """The run's name, with which engines know it: lower-case letters, digits and hyphens."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.directory.name.lower()).strip("-")
        return f"meshwright-{plain}"[:52].rstrip("-") if plain else "meshwright"

    @property
    def ranks_per_node(self) -> int:
        """The ranks of a node.

        Raises:
            LaunchError: it is not said.
        """
        if not self.nodes.ranks_per_node:
            raise LaunchError(
                "it is not said how many ranks a node has",
                where="nodes.ranks_per_node",
                remedy="give the number of its GPUs or cores",
            )
        return self.nodes.ranks_per_node

    def command(self, python: str = sys.executable, file: str = "", ranks: int = 0) -> list[str]:
        """The command with which a launcher or a rank trains. ``ranks``: the number that it starts, where nothing in
        its environment says so."""
        options = [*(["--trust"] if self.trust else []), *(["--train.ranks", f"{ranks}"] if ranks else [])]
        return [python, "-m", "meshwright.cli", "train", file or str(self.file.absolute()), *self.arguments, *options]


def shell(words: list[str]) -> str:
    """The words as a line of shell."""
    return shlex.join(words)


def called(words: list[str], where: str, text_input: str = "") -> str:
    """Run another program's command, and return what it prints.

    Raises:
        LaunchError: the program is not installed, or it has failed; the error has what it said.
    """
    if shutil.which(words[0]) is None:
        raise LaunchError(
            f"{words[0]} is not installed here", where=where, remedy=f"run this where {words[0]} is, or --dry-run"
        )
    done = subprocess.run(words, input=text_input, capture_output=True, text=True, check=False)
    if done.returncode:
        text = (done.stderr or done.stdout).strip() or f"it ended with {done.returncode}"
        raise LaunchError(text, where=shell(words), remedy="correct what it refuses; --dry-run shows what is submitted")
    return done.stdout
