"""Test that git runs the same whatever the caller's environment says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pyllamakv.errors import GitError
from pyllamakv.source import git_command

if TYPE_CHECKING:
    from pathlib import Path


def _repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    git_command.git(folder, "init", "-q", ".")
    return folder


def test_variables_of_the_caller_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a foreign GIT_DIR or identity cannot reach git."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "someone")
    env = git_command.environment()
    assert "GIT_DIR" not in env
    assert env["GIT_AUTHOR_NAME"] == git_command.NAME


def test_network_keeps_certificates_and_user_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a fetch from a URL keeps the required variables and no others."""
    monkeypatch.setenv("GIT_SSL_CAINFO", "/ca.pem")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/my/config")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    env = git_command.environment(network=True)
    assert env["GIT_SSL_CAINFO"] == "/ca.pem"
    assert env["GIT_CONFIG_GLOBAL"] == "/my/config"
    assert "GIT_DIR" not in env
    assert "GIT_SSL_CAINFO" not in git_command.environment()


def test_user_config_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a config in HOME changes neither identity nor line ends."""
    (tmp_path / ".gitconfig").write_text("[user]\nname = other\n[core]\nautocrlf = true\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    repo = _repository(tmp_path / "repo")
    assert git_command.git(repo, "config", "core.autocrlf") == "false"
    assert git_command.git(repo, "config", "user.name", check=False) == ""


def test_hooks_do_not_run(tmp_path: Path) -> None:
    """Check that a hook in the repository is ignored."""
    repo = _repository(tmp_path / "repo")
    hook = repo / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    git_command.git(repo, "commit", "--allow-empty", "-q", "-m", "empty")
    assert git_command.git(repo, "log", "--format=%an %at") == f"{git_command.NAME} 1795132800"


def test_same_content_has_the_same_commit_id(tmp_path: Path) -> None:
    """Check that the same content gives the same commit id in two places."""
    ids = set()
    for name in ("one", "two"):
        repo = _repository(tmp_path / name)
        (repo / "file").write_text("text\n")
        git_command.git(repo, "add", "file")
        git_command.git(repo, "commit", "-q", "-m", "message")
        ids.add(git_command.git(repo, "rev-parse", "HEAD"))
    assert len(ids) == 1


def test_apply_works_inside_another_work_tree(tmp_path: Path) -> None:
    """Check that git apply changes a file below a foreign repository instead of skipping it."""
    inner = _repository(tmp_path / "outer") / "vendor" / "tree"
    inner.mkdir(parents=True)
    (inner / "f").write_text("a\n")
    patch = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"
    git_command.git(inner, "apply", "-", input=patch)
    assert (inner / "f").read_text() == "b\n"


def test_failure_shows_command_and_words(tmp_path: Path) -> None:
    """Check that GitError has the command, the status and git's message."""
    with pytest.raises(GitError) as caught:
        git_command.git(tmp_path, "rev-parse", "HEAD")
    assert caught.value.command == ("git", "rev-parse", "HEAD")
    assert caught.value.code == 128
    assert "not a git repository" in caught.value.output
    assert git_command.git(tmp_path, "rev-parse", "HEAD", check=False) == ""


def test_a_message_has_no_control_characters(tmp_path: Path) -> None:
    """A remote may send any byte; the message goes to terminals, JSON and XML."""
    words = ("-c", "alias.x=!printf 'remote: a\\000b\\033' >&2; exit 3", "x")
    with pytest.raises(GitError) as caught:
        git_command.git(tmp_path, *words)
    assert "remote: a\\x00b\\x1b" in caught.value.output
    assert "\0" not in str(caught.value)


def test_missing_directory_and_missing_git_have_different_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a missing folder and a missing git have different errors."""
    with pytest.raises(GitError, match="no directory"):
        git_command.git(tmp_path / "absent", "version")
    (tmp_path / "file").write_text("")
    with pytest.raises(GitError, match="not a directory"):
        git_command.git(tmp_path / "file", "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitError, match="install git"):
        git_command.git(tmp_path, "version")


def test_bytes_are_unchanged_in_both_directions(tmp_path: Path) -> None:
    """Check that bytes that are not UTF-8 are passed unchanged in both directions."""
    repo = _repository(tmp_path / "repo")
    blob = git_command.git(repo, "hash-object", "-w", "--stdin", input=b"\xff\n")
    assert git_command.git_bytes(repo, "cat-file", "blob", blob) == b"\xff\n"


def test_git_itself_gets_no_variable_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the variables of the process: GitPython adds to the caller's and drops none."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("GIT_SSH_COMMAND", "false")
    repo = _repository(tmp_path / "repo")
    words = ("-c", "alias.shown=!env", "shown")
    for network, kept in ((False, set()), (True, {"GIT_SSH_COMMAND"})):
        lines = git_command.git(repo, *words, network=network).splitlines()
        names = {line.partition("=")[0] for line in lines}
        assert "GIT_ALLOW_PROTOCOL" in names
        assert names & {"GIT_DIR", "GIT_TRACE", "GIT_SSH_COMMAND"} == kept
    assert not (tmp_path / "trace").exists()


def test_git_never_runs_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a directory that disappears is an error: GitPython would use its own."""
    repo = _repository(tmp_path / "repo")
    monkeypatch.chdir(repo)
    monkeypatch.setattr(type(tmp_path), "is_dir", lambda _path: True)
    with pytest.raises(GitError, match="cannot change to"):
        git_command.git(tmp_path / "gone", "rev-parse", "--git-dir")


def test_git_output_is_streamed(tmp_path: Path) -> None:
    """Check that a stream yields stdout, carries stderr in the error, and ends with its reader."""
    repo = _repository(tmp_path / "repo")
    with git_command.stream(repo, "rev-parse", "--git-dir") as out:
        assert out.read() == b".git\n"
    # More on stderr than a pipe holds, before stdout ends.
    noise = "alias.noise=!head -c 1000000 /dev/zero | tr '\\0' x >&2; echo end; exit 3"
    with (
        pytest.raises(GitError, match=r"^`git -c") as caught,
        git_command.stream(repo, "-c", noise, "noise") as out,
    ):
        assert out.read() == b"end\n"
    assert (caught.value.code, len(caught.value.output)) == (3, 64 << 10)
    endless = "alias.endless=!exec yes"
    with (
        pytest.raises(ZeroDivisionError),
        git_command.stream(repo, "-c", endless, "endless") as out,
    ):
        assert out.read(4) == b"y\ny\n"
        raise ZeroDivisionError
