"""SkyRL's Tinker server on this CPU, without `uv run`, serving one Hugging Face folder.

    python tests/tinker_server.py MODEL STATE [PORT]

MODEL is the folder. STATE gets the server's database and the checkpoints, so that a server that is
started again with the same STATE still has them.
"""

import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # before Python 3.12 pydantic wants this one

BACKEND = {
    "max_lora_adapters": 8, "max_lora_rank": 32, "train_micro_batch_size": 16,
    "sample_max_num_sequences": 64,
}  # fmt: skip


def serve(model: str, state: str, port: str = "8077") -> None:
    import uvicorn
    from skyrl.tinker import api, config

    def engine_command(_parent, engine_config):
        return [sys.executable, __file__, "engine", *config.config_to_argv(engine_config)]

    api._build_uv_run_cmd_engine = engine_command
    api.app.state.engine_config = config.EngineConfig(
        base_model=model,
        backend="jax",
        backend_config=BACKEND,
        database_url=f"sqlite:///{state}/tinker.db",
        checkpoints_base=f"{state}/checkpoints",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=int(port), log_level="warning")


def engine(*_flags: str) -> None:
    from skyrl.tinker import engine as skyrl_engine

    sys.argv.pop(1)
    skyrl_engine.main()


if __name__ == "__main__":
    engine() if sys.argv[1] == "engine" else serve(*sys.argv[1:])
