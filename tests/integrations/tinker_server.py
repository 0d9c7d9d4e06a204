"""SkyRL's Tinker server on this CPU with the embedded model, and a program beside it.

    python tests/integrations/tinker_server.py PROGRAM [ARGUMENTS]

runs the program while it serves port 8077. out-server/ gets the server's log, its database and the
weights, so that a program may go on another day. tests/tinker.sh makes the environment.
"""

import contextlib
import os
import subprocess
import sys
import time
import typing
import urllib.request
from pathlib import Path

import typing_extensions

ROOT = Path(__file__).resolve().parents[2]
PORT = 8077
BACKEND = {  # of 2 CPU cores; 16 x 96 tokens are trained on at once
    "max_lora_adapters": 16, "max_lora_rank": 32, "train_micro_batch_size": 16,
    "sample_max_num_sequences": 64,
}  # fmt: skip
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}  # fmt: skip


def base_folder() -> str:
    """The folder of the embedded model, by the environment's own versions."""
    from tasks import arithmetic

    return str(arithmetic.BASE)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=5)
        return True
    return False


@contextlib.contextmanager
def serving(folder: Path, port: int = PORT, **env):
    """The process of a server, once it answers; it is ended afterwards. `folder` keeps its state,
    what it compiles, and server.log."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if answers(port):
        raise RuntimeError(f"port {port} is taken by another server: stop it")
    command = [sys.executable, __file__, "--serve", base_folder(), str(folder), str(port)]
    with open(folder / "server.log", "a") as log:
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
        env = cache | os.environ | ONE_THREAD | env
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            while not answers(port):
                if process.poll() is not None:
                    raise RuntimeError(f"the server has ended: see {folder / 'server.log'}")
                time.sleep(0.5)
            yield process
        finally:
            process.terminate()
            process.wait()


def serve(model: str, folder: str, port: str) -> None:
    """Without `uv run`, by which SkyRL's own command starts the engine's process."""
    import uvicorn
    from skyrl.tinker import api, config

    def engine_command(_parent, engine_config):
        return [sys.executable, __file__, "--engine", *config.config_to_argv(engine_config)]

    api._build_uv_run_cmd_engine = engine_command
    api.app.state.engine_config = config.EngineConfig(
        base_model=model,
        backend="jax",
        backend_config=BACKEND,
        database_url=f"sqlite:///{folder}/tinker.db",
        checkpoints_base=f"{folder}/checkpoints",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=int(port), log_level="warning")


def main(kind: str, *arguments: str) -> int:
    if kind in ("--serve", "--engine"):
        typing.TypedDict = typing_extensions.TypedDict  # pydantic wants it before Python 3.12
    if kind == "--serve":
        serve(*arguments)
    elif kind == "--engine":
        from skyrl.tinker import engine

        sys.argv.pop(1)
        engine.main()
    else:
        with serving(Path("out-server")):
            env = {
                "TINKER_API_KEY": "tml-mine",
                "PYTHONPATH": f"{ROOT}:{ROOT / 'integrations'}",
            } | os.environ
            command = [sys.executable, kind, *arguments]
            return subprocess.run(command, env=env, check=False).returncode
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(*sys.argv[1:]))
