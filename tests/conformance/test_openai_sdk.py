"""The official OpenAI SDK against the whole system."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from shared.model_files import ModelFolder
from tests.support.stack import KEY, Stack, running_stack


@pytest.fixture(scope="module")
def stack(smollm: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(smollm, tmp_path_factory.mktemp("sdk")) as one:
        yield one


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def test_models(client: openai.OpenAI, stack: Stack) -> None:
    assert [model.id for model in client.models.list()] == [stack.model.name]
    assert client.models.retrieve(stack.model.name).object == "model"


def test_chat(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model.name,
        messages=[{"role": "user", "content": "Answer in one sentence: what is the capital of France?"}],
        temperature=0,
        max_tokens=30,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream(client: openai.OpenAI, stack: Stack) -> None:
    chunks = list(
        client.chat.completions.create(
            model=stack.model.name,
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Say hello."}]}],
            max_completion_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    assert chunks[-1].usage is not None
    assert not chunks[-1].choices


def test_completions(client: openai.OpenAI, stack: Stack) -> None:
    prompts = ["The sun rises in the", "Water boils at"]
    whole = client.completions.create(model=stack.model.name, prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.completions.create(model=stack.model.name, prompt=prompts, max_tokens=6, temperature=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_errors_raise_the_right_classes(client: openai.OpenAI, stack: Stack) -> None:
    hello: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=hello)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=stack.model.name, messages=hello, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as large:
        client.chat.completions.create(model=stack.model.name, messages=hello, max_tokens=100_000)
    assert large.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


async def test_async_client(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=stack.model.name, messages=[{"role": "user", "content": "Count to three."}], stream=True, max_tokens=20
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces).strip()
