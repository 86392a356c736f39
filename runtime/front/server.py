"""The server that clients reach: listens before there is anything to serve, opens its services over an engine, and
stops without cutting streams short.

    listen ──▶ health says NOT_SERVING, all else is UNAVAILABLE ──open──▶ services ──stop──▶ refusals, last streams, end

Clients and operators have a port each, or share one.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import grpc.aio
from grpc_reflection.v1alpha import reflection

from configs.schema import ServeSettings
from outrider.v1 import inference_pb2_grpc, operator_pb2_grpc
from runtime.access.watched import Watched
from runtime.front.bounds import REQUEST_LIMIT_BYTES, request_limit_bytes
from runtime.front.calls import STOPPED, Calls
from runtime.front.convert import ServedModel
from runtime.front.defaults import SamplingDefaults
from runtime.front.doors import Doors
from runtime.front.engine_link import EngineLink
from runtime.front.entrance import Entrance
from runtime.front.errors import Unavailable
from runtime.front.health import INFERENCE, OPERATOR, Health
from runtime.front.hub import StreamHub
from runtime.front.inference_service import InferenceService
from runtime.front.malformed import RefuseMalformed
from runtime.front.operator_service import OperatorService
from runtime.front.refusals import CountRefusals, Refusals
from runtime.front.tokenizer import Tokenizer
from runtime.front.versions import installed_versions
from runtime.front.vllm.presence import VLLM_ENGINE, why_absent
from runtime.in_force import SettingsInForce
from runtime.observe.records import UNOBSERVED, Observer
from runtime.reload import Reloader
from runtime.status import FrontStatus
from workers.address import join_address
from workers.channel import bind, make_async_server

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""How long streams that a stop ends may take to send their status."""

HEALTH_LIMIT_BYTES = 4096
"""Of a question that names a service."""

BESIDE = ("grpc.health.v1.Health", reflection.SERVICE_NAME)
"""What stands beside the services on every port."""


class FrontServer:
    """All public services over one engine.

    settings: with a served name. reloader: reads them again when an operator asks.
    """

    def __init__(self, settings: SettingsInForce, reloader: Reloader, observer: Observer = UNOBSERVED) -> None:
        assert settings.now.model.served_name is not None, "settings without a served name"
        self._in_force = settings
        self._reloader = reloader
        self._observer = observer
        self._name = settings.now.model.served_name
        faces = (INFERENCE,) if why_absent() else (INFERENCE, VLLM_ENGINE)
        self._health = Health(faces)
        is_shared = settings.now.operator.port == "shared"
        self._public_doors = Doors((*faces, OPERATOR) if is_shared else faces)
        self._operator_doors = self._public_doors if is_shared else Doors((OPERATOR,))
        self._malformed = RefuseMalformed()
        self._refusals = Refusals()
        self._versions = installed_versions()
        self._entrance: Entrance | None = None
        self._public: grpc.aio.Server | None = None
        # Of operators; the public one where they share it.
        self._operators: grpc.aio.Server | None = None
        # Of probes, in plain text; None where there is no port for them.
        self._probes: grpc.aio.Server | None = None
        self._public_port = self._operator_port = self._health_port = 0
        self._hub: StreamHub | None = None
        self._calls: Calls | None = None
        self._operator: OperatorService | None = None

    async def listen(self) -> None:
        """Answers health, and refuses the rest until `open`. Raises OSError that names the address when it is taken,
        and as `Entrance`."""
        settings = self._settings
        self._entrance = entrance = Entrance(settings)
        self._public = self._make_server(self._public_doors, entrance)
        self._public_port = bind(self._public, settings.server.host, settings.server.port, entrance.public_security)
        if settings.operator.port == "shared":
            self._operators, self._operator_port = self._public, self._public_port
        else:
            self._operators = self._make_server(self._operator_doors, entrance)
            self._operator_port = bind(
                self._operators, self._operator_host, settings.operator.port, entrance.operator_security
            )
        if settings.server.health_port != "none":
            self._probes = make_async_server(
                [self._malformed], receive_limit_bytes=HEALTH_LIMIT_BYTES, options=entrance.options
            )
            self._health_port = bind(self._probes, settings.server.host, settings.server.health_port)
        for server in self._servers:
            self._health.start(server)
            await server.start()

    async def open(
        self, engine: EngineLink, hub: StreamHub, tokenizer: Tokenizer, *, defaults: SamplingDefaults
    ) -> None:
        """Serves an engine that has been started. hub: the engine's EventSink. defaults: the checkpoint's."""
        assert self._public is not None, "not listening"
        assert self._operators is not None
        assert self._entrance is not None
        description = engine.description
        model = ServedModel(
            name=self._name,
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            eos_token_ids=description.eos_token_ids,
            default_max_tokens=lambda: self._settings.scheduler.default_max_tokens,
            defaults=defaults,
            takes_oracle=description.drafter == "oracle",
            takes_typical=self._settings.speculation.allow_typical,
            encode=tokenizer.encode_word,
        )
        if model.takes_oracle:
            log.warning(
                "speculation.drafter is oracle: requests may bring drafts of their own, which is for measurements alone"
            )
        version = metadata.version("outrider")
        self._malformed.bound(request_limit_bytes(description.max_model_len))
        self._hub = hub
        self._calls = Calls(engine, hub, tokenizer, model, self._observer, self._entrance.quotas)
        self._operator = OperatorService(
            engine, self.status, self._reloader.reload, model_name=model.name, version=version
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceService(self._calls, version=version), self._public_doors
        )
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self._operator, self._operator_doors
        )
        if not why_absent():
            self._open_vllm_engine(self._calls, version)
        self._public_doors.open()
        self._operator_doors.open()
        self._health.follow(engine)

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuses new streams, lets running ones finish, ends the rest with UNAVAILABLE and closes.

        drain_s: how long streams may take; `server.drain_s` if left out. Idempotent, and a second call may be shorter.
        """
        if self._public is None or self._operators is None:
            self._close_entrance()
            return
        self._health.drain()
        if self._calls is not None and self._hub is not None:
            self._calls.drain()
            if not await self._calls.wait_idle(self._settings.server.drain_s if drain_s is None else drain_s):
                self._calls.close()
                self._hub.fail_all(Unavailable(STOPPED))
                await self._calls.wait_idle(LAST_WORDS_S)
        self._health.end()
        if self._operator is not None:
            await self._operator.stop(LAST_WORDS_S)
        # Watches of health and writers whose reader sleeps end here; they would keep a graceful stop waiting.
        for server in self._servers:
            await server.stop(None)
        self._public = self._operators = self._probes = None
        self._close_entrance()

    def status(self) -> FrontStatus:
        """What it has refused and has open."""
        return FrontStatus(
            errors=self._refusals.view(),
            open_calls=0 if self._calls is None else self._calls.num_running,
            open_streams=0 if self._hub is None else self._hub.num_streams,
            versions=self._versions,
            reloads=self._reloader.status(),
            files=() if self._entrance is None else self._entrance.status(),
        )

    @property
    def watched(self) -> tuple[Watched[Any], ...]:
        """Certificates and identities, which are to be read again when they change; none before `listen`."""
        return () if self._entrance is None else self._entrance.watched

    @property
    def address(self) -> str:
        """host:port where clients reach us; known once `listen` has returned."""
        assert self._public_port, "not listening"
        return join_address(self._settings.server.host, self._public_port)

    @property
    def operator_address(self) -> str:
        """host:port where operators reach us; `address` where they share it."""
        assert self._operator_port, "not listening"
        return join_address(self._operator_host, self._operator_port)

    @property
    def health_address(self) -> str | None:
        """host:port where health is told in plain text; None where it is not."""
        return join_address(self._settings.server.host, self._health_port) if self._health_port else None

    @property
    def _servers(self) -> set[grpc.aio.Server]:
        """One per port that is open."""
        return {server for server in (self._public, self._operators, self._probes) if server is not None}

    @property
    def _settings(self) -> ServeSettings:
        return self._in_force.now

    @property
    def entrance(self) -> Entrance:
        """What guards the ports; known once `listen` has begun."""
        assert self._entrance is not None, "not listening"
        return self._entrance

    @property
    def _operator_host(self) -> str:
        return self._settings.operator.host or self._settings.server.host

    def _open_vllm_engine(self, calls: Calls, version: str) -> None:
        from runtime.front.vllm.service import Surroundings, add_vllm_engine

        assert self._settings.model.path is not None, "settings without a checkpoint"
        around = Surroundings(
            checkpoint=self._settings.model.path, version=version, is_ready=lambda: self._health.is_ready
        )
        add_vllm_engine(self._public_doors, calls, around)

    def _close_entrance(self) -> None:
        if self._entrance is not None:
            self._entrance.close()

    def _make_server(self, doors: Doors, entrance: Entrance) -> grpc.aio.Server:
        """A server of what will stand behind the doors."""
        server = make_async_server(
            [CountRefusals(self._refusals), entrance.guard, self._malformed],
            receive_limit_bytes=REQUEST_LIMIT_BYTES,
            options=entrance.options,
        )
        server.add_generic_rpc_handlers((doors,))
        reflection.enable_server_reflection((*doors.services, *BESIDE), server)
        return server
