"""The server that clients reach: builds it from its services, starts it, and stops it without cutting streams short."""

from __future__ import annotations

import logging
from importlib import metadata

import grpc.aio
from grpc_reflection.v1alpha import reflection

from configs.schema import ServeSettings
from outrider.v1 import inference_pb2_grpc, operator_pb2_grpc
from runtime.front.bounds import request_limit_bytes
from runtime.front.convert import ServedModel
from runtime.front.defaults import SamplingDefaults
from runtime.front.engine_link import EngineLink
from runtime.front.errors import Unavailable
from runtime.front.health import INFERENCE, OPERATOR, Health
from runtime.front.hub import StreamHub
from runtime.front.inference_service import InferenceService
from runtime.front.malformed import RefuseMalformed
from runtime.front.operator_service import OperatorService
from runtime.front.tokenizer import Tokenizer
from workers.channel import bind, make_async_server

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""How long streams that a stop ends may take to send their status."""

SERVICES = (INFERENCE, OPERATOR, "grpc.health.v1.Health", reflection.SERVICE_NAME)
"""What reflection lists."""


class FrontServer:
    """All public services over one engine that has been started.

    hub: the engine's EventSink.
    settings: as `load_settings` returns them, with a served name.
    defaults: the checkpoint's sampling defaults.
    """

    def __init__(
        self,
        engine: EngineLink,
        hub: StreamHub,
        tokenizer: Tokenizer,
        settings: ServeSettings,
        *,
        defaults: SamplingDefaults,
    ) -> None:
        assert settings.model.served_name is not None, "settings without a served name"
        description = engine.description
        model = ServedModel(
            name=settings.model.served_name,
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            eos_token_ids=description.eos_token_ids,
            default_max_tokens=settings.scheduler.default_max_tokens,
            defaults=defaults,
            takes_oracle=description.drafter == "oracle",
            takes_typical=settings.speculation.allow_typical,
            encode=tokenizer.encode_word,
        )
        if model.takes_oracle:
            log.warning(
                "speculation.drafter is oracle: requests may bring drafts of their own, which is for measurements alone"
            )
        self._settings = settings.server
        self._request_limit_bytes = request_limit_bytes(description.max_model_len)
        self._hub = hub
        self._health = Health(engine)
        version = metadata.version("outrider")
        self._inference = InferenceService(engine, hub, tokenizer, model, version=version)
        self._operator = OperatorService(engine, model_name=model.name, version=version)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listens on `server.host` and `server.port`; returns the bound port. Raises OSError when it is taken."""
        server = make_async_server([RefuseMalformed()], receive_limit_bytes=self._request_limit_bytes)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, server)  # type: ignore[no-untyped-call]
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(self._operator, server)  # type: ignore[no-untyped-call]
        await self._health.start(server)
        reflection.enable_server_reflection(SERVICES, server)
        port = bind(server, self._settings.host, self._settings.port)
        await server.start()
        self._server = server
        return port

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuses new streams, lets running ones finish, ends the rest with UNAVAILABLE and closes.

        drain_s: how long streams may take; `server.drain_s` if left out. Idempotent, and a second call may be shorter.
        """
        if self._server is None:
            return
        await self._health.drain()
        self._inference.drain()
        if not await self._inference.wait_idle(self._settings.drain_s if drain_s is None else drain_s):
            self._hub.fail_all(Unavailable("this server has stopped; ask another one"))
            await self._inference.wait_idle(LAST_WORDS_S)
        await self._operator.stop(LAST_WORDS_S)
        # Watches of health and writers whose reader sleeps end here; they would keep a graceful stop waiting.
        await self._server.stop(None)
        self._server = None
