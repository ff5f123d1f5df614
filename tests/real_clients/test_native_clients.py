"""Tests of the real clients of text-generation and huggingface_hub with the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from bridle.config import ModelConfig
from bridle.serving import AdapterSpec, add_adapters, load_model
from tests.http.harness import served
from tests.real_clients.environment import foreign_python, run_script
from tests.serving.fake_adapters import write_demo_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGES = ("text-generation==0.7.0", "huggingface_hub==0.36.2")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the demo model with an adapter whose answers differ from the model's."""
    model = load_model(ModelConfig("demo"))
    add_adapters(model, [AdapterSpec("pirate", str(write_demo_adapter(tmp_path_factory.mktemp("pirate"))))])
    with served(model) as url:
        yield url


@pytest.mark.parametrize("script", ["script_text_generation.py", "script_huggingface.py"])
def test_real_client(demo: str, script: str) -> None:
    source = (HERE / script).read_text()
    printed = run_script(foreign_python(*PACKAGES), HERE / script, demo)
    assert printed.count(" ok\n") == source.count("\ndef check_") > 0


def test_openais_client_names_adapters_as_models(demo: str) -> None:
    with openai.OpenAI(base_url=demo + "/v1", api_key="none", max_retries=0) as client:

        def complete(**fields: Any) -> Any:
            ask = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            return client.completions.create(**(ask | fields))

        assert {model.id: model.parent for model in client.models.list()} == {"demo": None, "pirate": "demo"}
        plain, other = complete(), complete(model="pirate")
        assert plain.choices[0].text == " Paris." != other.choices[0].text and other.model == "pirate"
        assert complete(extra_body={"adapter": "pirate"}).choices[0].text == other.choices[0].text
        turn: Any = [{"role": "user", "content": "Is snow white?"}]
        chunks = client.chat.completions.create(model="pirate", messages=turn, max_tokens=8, stream=True)
        assert {chunk.model for chunk in chunks} == {"pirate"}
        response = client.responses.create(model="pirate", input="Is snow white?", max_output_tokens=16)
        assert response.model == "pirate"
        with pytest.raises(openai.NotFoundError, match="'nobody'"):
            complete(model="nobody")
        with pytest.raises(openai.NotFoundError, match="no adapter 'nobody'"):
            complete(extra_body={"adapter": "nobody"})


def test_anthropics_client_names_adapters_as_models(demo: str) -> None:
    with anthropic.Anthropic(base_url=demo, api_key="none", max_retries=0) as client:
        turn: Any = [{"role": "user", "content": "Is snow white?"}]
        message = client.messages.create(model="pirate", max_tokens=8, messages=turn)
        assert message.model == "pirate"
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.messages.create(model="nobody", max_tokens=8, messages=turn)
