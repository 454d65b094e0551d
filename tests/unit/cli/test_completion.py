"""The scripts for shells complete commands, options and values."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Bascule

ARGUMENTS = "_TYPER_COMPLETE_ARGS"
PROTOCOLS = {
    "zsh": {"_BASCULE_COMPLETE": "complete_zsh"},
    "fish": {"_BASCULE_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_values(tmp_path: Path, bascule: Bascule) -> None:
    program = tmp_path / "bascule"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m bascule "$@"\n')
    program.chmod(0o755)
    script = bascule("completion", "bash").stdout + (
        'complete_words() { COMP_WORDS=(bascule "$@"); COMP_CWORD=$#; _bascule_completion bascule; echo "${COMPREPLY[@]}"; }\n'
        'complete_words queue pu; complete_words queue list --format ""\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert (done.stdout, done.stderr) == ("purge\ntable wide csv json\n", "")


def sourced(shell: str, text: str, tmp_path: Path) -> list[str]:
    """Return the lines that a shell prints for a text, with ``bascule`` on its path."""
    program = tmp_path / "bascule"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m bascule "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    command = [shell, "--no-config" if shell == "fish" else "-f", "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_and_values(tmp_path: Path) -> None:
    text = 'bascule completion fish | source; complete -C "bascule queue pu"; complete -C "bascule queue list --format "'
    names = [line.partition("\t")[0] for line in sourced("fish", text, tmp_path)]
    assert (names[0], sorted(names[1:])) == ("purge", ["csv", "json", "table", "wide"])


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_commands(tmp_path: Path) -> None:
    # _arguments works in the line editor only; the script gives it the commands with their descriptions.
    text = (
        "autoload -Uz compinit; compinit -u; source <(bascule completion zsh); print -r -- $_comps[bascule]\n"
        '_arguments() { print -r -- "$@" }; words=(bascule queue pu); CURRENT=3; _bascule_completion'
    )
    registered, offered = sourced("zsh", text, tmp_path)
    assert registered == "_bascule_completion"
    assert "purge" in offered


@pytest.mark.parametrize("shell", PROTOCOLS)
@pytest.mark.parametrize(
    ("words", "found", "not_found"),
    [
        ("bascule queu", ["queue"], "topic"),
        ("bascule queue pu", ["purge"], "move"),
        ("bascule queue list --form", ["--format"], "--admin"),
        ("bascule queue list --format ", ["table", "wide", "csv", "json"], "--admin"),
    ],
)
def test_request_of_the_script_of_another_shell_is_answered(
    shell: str, words: str, found: list[str], not_found: str, bascule: Bascule, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = bascule("completion", shell).stdout
    for name, value in {**PROTOCOLS[shell], ARGUMENTS: words}.items():
        assert name in script
        monkeypatch.setenv(name, value)
    answer = bascule().stdout
    assert [each for each in found if each not in answer] == []
    assert not_found not in answer


def test_names_of_contexts_are_completed(bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("production", "staging"):
        bascule("context", "add", name, "--admin", "https://broker.example:8672")
    for name, value in {**PROTOCOLS["zsh"], ARGUMENTS: "bascule context use pro"}.items():
        monkeypatch.setenv(name, value)
    answer = bascule().stdout
    assert "production" in answer
    assert "staging" not in answer


def test_shell_that_is_not_supported_is_refused_with_the_supported_ones(bascule: Bascule) -> None:
    done = bascule("completion", "csh")
    assert done.returncode == 2
    assert all(shell in done.stderr for shell in ("bash", "zsh", "fish"))
