"""The routes under `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from palaver.errors import BadParameter
from palaver.server.auth import CallerDep
from palaver.server.responses import serving
from palaver.server.responses.conversations import page_items
from palaver.server.responses.request import check_request
from palaver.server.responses.schemas import (
    Includable,
    InputItemList,
    InputTokens,
    ResponseBody,
    ResponseDeleted,
    ResponseRequest,
)
from palaver.server.sse import EventStream, answer_while_loading
from palaver.server.state import ChatDep, StateDep

MAX_NUMBER = 2**31
MAX_ITEMS = 100
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ResponseBody,
        "description": "The response; as a stream, events that each have a `type` and a `sequence_number`.",
        "content": {EventStream.media_type: {"schema": {"type": "object"}}},
    }
}
Include = Annotated[list[Includable] | None, Query()]
BracketedInclude = Annotated[list[Includable] | None, Query(alias="include[]")]


def router() -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/responses", response_model=None, responses=_RESPONSES)
    async def create(request: Request, body: ResponseRequest, caller: CallerDep, state: StateDep) -> Response:
        """A reply to the input, after the previous response if one is named. Unless `store` is false it is stored in a
        conversation and can be retrieved by its id."""
        check_request(body)
        answer = serving.answer_stateless if body.store is False else serving.answer_stored
        coming = answer(request, body, caller.owner_id, state)
        return await answer_while_loading(request, state, body.model, body.stream, coming)

    @routes.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponseRequest, caller: CallerDep, state: StateDep) -> InputTokens:
        """Counts the prompt tokens of a response. Nothing is generated."""
        check_request(body)
        return InputTokens(input_tokens=await serving.count_input_tokens(body, caller.owner_id, state))

    @routes.get("/v1/responses/{id}", response_model=None, responses=_RESPONSES)
    async def retrieve(
        request: Request,
        id: str,
        chat: ChatDep,
        caller: CallerDep,
        state: StateDep,
        include: Include = None,
        bracketed: BracketedInclude = None,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, le=MAX_NUMBER)] = None,
        include_obfuscation: bool | None = None,
    ) -> Response:
        """A response in its current state; as a stream, its events after a number, to its end."""
        included = [*(include or ()), *(bracketed or ())]
        if stream:
            after = -1 if starting_after is None else starting_after
            return await serving.stream_stored(request, state, chat, caller.owner_id, id, after, included)
        if starting_after is not None:
            raise BadParameter("starting_after", starting_after, "needs stream to be true")
        return JSONResponse(await serving.read_response(state, chat, caller.owner_id, id, included))

    @routes.post("/v1/responses/{id}/cancel", response_model=None, responses=_RESPONSES)
    async def cancel(id: str, chat: ChatDep, caller: CallerDep, state: StateDep) -> Response:
        """Stops a running response and keeps its text. Has no effect on one that has ended."""
        return JSONResponse(await serving.cancel_response(state, chat, caller.owner_id, id))

    @routes.delete("/v1/responses/{id}")
    async def delete(id: str, chat: ChatDep, state: StateDep) -> ResponseDeleted:
        """Deletes a response, and with the last response of a conversation the conversation."""
        await serving.delete_response(state, chat, id)
        return ResponseDeleted(id=id)

    @routes.get("/v1/responses/{id}/input_items")
    async def input_items(
        id: str,
        chat: ChatDep,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
        include: Include = None,
        bracketed: BracketedInclude = None,
    ) -> InputItemList:
        """The input items of its request."""
        items = await serving.input_items(chat, id)
        return page_items(items if order == "asc" else items[::-1], after, limit)

    return routes
