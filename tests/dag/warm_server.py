"""Runs `python -m` commands in children of a process that has the libraries loaded already.

    python warm_server.py SOCKET

DVC and the six stages, after each of several edits, would import torch and its kind again and
again, for minutes. Code of ours is not loaded here: each child reads that of its own folder.
"""

import os
import runpy
import signal
import socket
import sys
import warnings

MODEL_LIBRARIES = (
    "PIL.ImageDraw diffusers.guiders einops hydra hydra._internal.core_plugins.basic_launcher "
    "jaxtyping matplotlib.backends.backend_agg matplotlib.figure mlflow omegaconf peft torch"
)
DVC = "dvc.cli.parser dvc.repo.metrics dvc.repo.plots dvc.repo.reproduce dvc.stage.run"
LOOK_SECONDS = 5


def warm_up() -> None:
    warnings.simplefilter("ignore")
    for name in f"{MODEL_LIBRARIES} {DVC}".split():
        __import__(name)
    # Their packages load a class when its name is asked for.
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel  # noqa: F401
    from transformers import CLIPTextModel, T5EncoderModel  # noqa: F401


def run(place: str, words: list[str], *, output: int) -> None:
    """Become the command; never returns."""
    os.chdir(place)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, place)
    sys.argv = words
    code: object = 1
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def serve(connection: socket.socket) -> None:
    """One command, asked for as its folder, its output's file and its words, by tabs."""
    place, output, *words = connection.makefile().readline().rstrip("\n").split("\t")
    file = os.open(os.path.join(place, output), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    pid = os.fork()
    if pid == 0:
        run(place, words, output=file)
    _, status = os.waitpid(pid, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def main(address: str) -> None:
    """A child for each command: those of a `dvc repro` come while it is waited for."""
    parent = os.getppid()
    warm_up()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        listener.settimeout(LOOK_SECONDS)
        while os.getppid() == parent:  # tests that were killed stop nobody
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
