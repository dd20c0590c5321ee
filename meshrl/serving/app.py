"""The ASGI application of the server: its routes, access checks and weight uploads.

Generation:   /v1/completions and /v1/chat/completions, in OpenAI's format
Information:  /v1/models, /health, /metrics
Control:      /update_weights, /pause, /resume, open only to holders of the server's token
"""

from __future__ import annotations

import hmac
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from safetensors import SafetensorError, safe_open
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from meshrl.config.web_access import is_json, refusal
from meshrl.data.images import Images
from meshrl.rollout.base import refusal as request_refusal
from meshrl.rollout.build import folder_weights
from meshrl.rollout.requests import Request as RolloutRequest
from meshrl.serving.openai_answers import Answering, ChatShape, CompletionShape, Shape
from meshrl.serving.openai_requests import (
    AnyBody,
    ChatBody,
    CompletionBody,
    GenerationBody,
    PauseBody,
    Strict,
    UpdateBody,
    chat_prompt,
    parse,
    prompts_of,
)
from meshrl.serving.service import CONTENT_TYPE, ApiError, Service, read_body, save_body
from meshrl.serving.settings import Settings

UPLOAD_TYPES = ("application/octet-stream", "application/safetensors")
Guard = Callable[[Request], Awaitable[None]]


def build_app(service: Service) -> ASGIApp:
    """Build the ASGI application with all routes, error handlers and request counting."""
    app = FastAPI(title="meshrl", docs_url=None, redoc_url=None)
    may_ask = Depends(_guard(service.settings.api_key, needed=False))
    may_change = Depends(_guard(service.settings.token, needed=True))
    _add_generation(app, service, may_ask)
    _add_information(app, service, may_ask)
    _add_changes(app, service, may_change)

    @app.exception_handler(ApiError)
    async def on_refusal(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail)).response()

    @app.exception_handler(Exception)
    async def on_failure(_: Request, error: Exception) -> Response:
        return ApiError(500, f"internal error: {type(error).__name__}").response()

    return _counted(app, service, _for_programs(app, service.settings))


def _add_generation(app: FastAPI, service: Service, may_ask: Any) -> None:
    @app.post("/v1/completions", dependencies=[may_ask], openapi_extra=_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await _asked(service, request, CompletionBody)
        texts = prompts_of(body)
        _limit_answers(service, len(texts) * body.n)

        def encode() -> list[list[int]]:
            return [list(service.tokenizer(p)["input_ids"]) if isinstance(p, str) else p for p in texts]

        prompts = await service.encode(encode)
        return _answering(service, body, prompts, CompletionShape)

    @app.post("/v1/chat/completions", dependencies=[may_ask], openapi_extra=_schema(ChatBody))
    async def chat(request: Request) -> Response:
        body = await _asked(service, request, ChatBody)
        _limit_answers(service, body.n)
        prompt, images = await service.encode(lambda: chat_prompt(service.tokenizer, body, service.opened.images))
        return _answering(service, body, [prompt], ChatShape, images)


def _add_information(app: FastAPI, service: Service, may_ask: Any) -> None:
    name = service.settings.name
    card = {"id": name, "object": "model", "created": 0, "owned_by": "meshrl", "max_model_len": service.opened.context}

    @app.get("/v1/models", dependencies=[may_ask])
    async def models() -> Any:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{wanted:path}", dependencies=[may_ask])
    async def model(wanted: str) -> Any:
        _check_model(service, wanted)
        return card

    @app.get("/health")
    async def health() -> Response:
        state = "paused" if service.slots.is_shut else "ok"
        status = {"status": state, "model": name, "version": service.rollout.version}
        if service.failure is not None:
            return JSONResponse(status | {"status": "failed", "error": service.failure}, 503)
        return JSONResponse(status)

    @app.get("/metrics")
    async def metrics() -> Response:
        slots = service.slots
        text = service.metrics.text(slots.running, slots.waiting, await service.stats())
        return Response(text, media_type=CONTENT_TYPE)


def _add_changes(app: FastAPI, service: Service, may_change: Any) -> None:
    async def body_of(request: Request, kind: type[AnyBody]) -> AnyBody:
        return parse(kind, await _json_body(service, request))

    @app.post("/update_weights", dependencies=[may_change], openapi_extra=_schema(UpdateBody))
    async def update_weights(request: Request) -> Any:
        if request.headers.get("content-type", "").split(";")[0].strip() in UPLOAD_TYPES:
            return {"version": await _update_from_upload(service, request)}
        body = await body_of(request, UpdateBody)
        version = await service.update(lambda: from_folder(body.path, service), body.version)
        return {"version": version}

    @app.post("/pause", dependencies=[may_change], openapi_extra=_schema(PauseBody))
    async def pause(request: Request) -> Any:
        body = await body_of(request, PauseBody)
        await service.pause(body.mode)
        return {"status": "paused", "mode": body.mode}

    @app.post("/resume", dependencies=[may_change])
    async def resume() -> Any:
        await service.resume()
        return {"status": "ok"}


async def _update_from_upload(service: Service, request: Request) -> int:
    given = request.query_params.get("version")
    if given is not None and not (given.isdecimal() and len(given) < 10):
        raise ApiError(400, f"version must be a number of at most 9 digits, got '{given[:20]}'", "version")
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        await save_body(request, file, service.upload_limit(), service.settings.request_seconds)  # type: ignore[arg-type]
        file.flush()
        path = os.fspath(file.name)
        return await service.update(lambda: from_file(path, service), None if given is None else int(given))


async def _asked(service: Service, request: Request, kind: type[AnyBody]) -> AnyBody:
    """Read and parse the body of a generation request.

    Raise before reading if the queue is full, and after parsing if the body names another model.
    """
    service.slots.check()
    body = parse(kind, await _json_body(service, request))
    assert isinstance(body, GenerationBody)
    _check_model(service, body.model)
    return body


async def _json_body(service: Service, request: Request) -> bytes:
    """Read the request body, and refuse any content type but JSON unless the body is empty.

    Browsers let a web page send other content types to any address without a CORS preflight.
    """
    kinds, settings = request.headers.getlist("content-type"), service.settings
    if not is_json(kinds) and (kinds or not _has_no_body(request)):
        raise ApiError(415, f"the body must be JSON: send Content-Type: application/json, not {kinds or 'none'}")
    return await read_body(request, settings.max_request_bytes, settings.body_seconds)


def _has_no_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers


def _answering(
    service: Service, body: GenerationBody, prompts: Sequence[Sequence[int]], kind: type[Shape], images: Images = ()
) -> Answering:
    shape = kind(body, service.tokenizer, prompts)
    opened = service.opened
    requests = []
    for number, (prompt, seed) in enumerate(zip(prompts, body.seeds(len(prompts)), strict=True)):
        params = body.sampling(len(prompt), opened.context, opened.stop_token_ids)
        request = RolloutRequest(f"{shape.id}-{number}", tuple(prompt), params, seed, images)
        problem = request_refusal(request, opened.vocabulary, opened.context, sees=opened.images is not None)
        if problem is not None:
            raise ApiError(400, problem)
        requests.append(request)
    return Answering(service, requests, shape)


def _limit_answers(service: Service, count: int) -> None:
    most = service.settings.max_answers
    if count > most:
        raise ApiError(400, f"the request asks for {count} answers, more than the {most} allowed at once", "n")


def _check_model(service: Service, wanted: str) -> None:
    name = service.settings.name
    if wanted not in (name, str(service.opened.path)):
        raise ApiError(404, f"there is no model '{wanted[:200]}' here, only '{name}'", "model")


def _guard(secret: str | None, needed: bool) -> Guard:
    """Return a route dependency that refuses requests without `secret` as their bearer token.

    If `secret` is None, every request is refused if `needed`, and accepted otherwise.
    """

    async def guard(request: Request) -> None:
        if secret is None:
            if needed:
                raise ApiError(403, "this route is closed: start the server with a token to open it")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), secret.encode()):
            raise ApiError(401, "wrong or missing bearer token")

    return guard


def _schema(kind: type[Strict]) -> dict[str, Any]:
    """Return the OpenAPI entry for a request body that the route parses without FastAPI's help."""
    return {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}


def _for_programs(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Wrap `app` to refuse requests that a web page sends through a browser.

    The check is skipped if the server has an API key, because a web page does not have the key.
    """

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and settings.api_key is None:
            headers = Headers(scope=scope)
            hosts, local = headers.getlist("host"), scope.get("server")
            here = {local[0]} if local else set()  # the local address of the connection
            problem = refusal(hosts, headers.getlist("origin"), settings.names | here, "; --allowed-host adds a name")
            if problem and (hosts or scope.get("http_version") != "1.0"):  # browsers always send Host, and HTTP 1.1
                await ApiError(403, problem).response()(scope, receive, send)
                return
        await app(scope, receive, send)

    return answered


def _counted(app: FastAPI, service: Service, answers: ASGIApp) -> ASGIApp:
    """Wrap `answers` to count responses by route and status.

    Unknown paths are counted under the one name "other", because clients can invent any number of paths.
    """
    routes = {getattr(route, "path", "") for route in app.routes}

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = scope["path"] if scope["path"] in routes else "other"
                path = str(getattr(scope.get("route"), "path", known))  # `/v1/models/{name}`, as the app declares it
                service.metrics.responses[path, message["status"]] += 1
            await send(message)

        await answers(scope, receive, send_counted if scope["type"] == "http" else send)

    return counted


# Reading weights for an update: from a model folder on the server's machine, or from an uploaded safetensors file.


def from_folder(path: str, service: Service) -> Mapping[str, Tensor]:
    """Read the weights of the model folder at `path`; raise a 400 `ApiError` if they cannot be read.

    Files with the model's tensor names are read directly, all others through Transformers.
    """
    try:
        if not (Path(path) / "config.json").is_file():
            raise FileNotFoundError("there is no config.json")
        weights = _read(sorted(Path(path).glob("*.safetensors")), service)
        return weights if set(weights) == set(service.shapes) else _by_transformers(path, service)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ApiError(400, f"no weights could be read from '{path}': {error}", "path") from error


def from_file(path: str, service: Service) -> Mapping[str, Tensor]:
    """Read the weights of an uploaded safetensors file; raise a 400 `ApiError` if it is not one."""
    try:
        return _read([path], service)
    except (SafetensorError, OSError, ValueError) as error:
        raise ApiError(400, f"the body is not a safetensors file: {error}") from error


def _read(files: Iterable[str | Path], service: Service) -> dict[str, Tensor]:
    """Read all tensors in the model's dtype, except those that only repeat a tied weight."""
    weights: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name not in service.tied:
                    weights[name] = file.get_tensor(name).to(service.opened.dtype)
    return weights


def _by_transformers(path: str, service: Service) -> dict[str, Tensor]:
    """Load weights through Transformers, for files whose tensors have other names or shapes than the model's.

    Generation is paused while the weights are loaded.
    """
    # Transformers changes torch's default dtype for all threads while it builds a model, so generation must stop.
    service.rollout.pause("keep")
    try:
        return folder_weights(path, service.opened.dtype, service.opened.trust_remote_code)
    finally:
        if not service.slots.is_shut:  # checked here, because a client may have paused or resumed during the load
            service.rollout.resume()
