"""Programs that control or check texts in other systems, with the equivalent controllers or policies in bridle. They
are logits processors, guardrails, and the functions that an inferlet of Pie calls."""

from __future__ import annotations

from bridle.compat.schema import LibrarySymbol
from bridle.compat.vendor_fields import TEXT

#: The way to send files other than images.
MEDIA = "send sounds and videos as parts of messages (docs/sound-and-video.md)"
_FOR_ALL = "a policy of the kind `python` applies the class to all requests"
_ENGINE_OWNS = "the engine alone manages forward passes and KV pages; limits apply to all requests"


def _pie(names: str, *exports: str, why: str = "", **here: tuple[str, ...]) -> LibrarySymbol:
    return LibrarySymbol("Pie", ", ".join(names.split()), exports=exports, why=why, **here)


#: Programs that steer or guard texts in other systems.
STEERING: tuple[LibrarySymbol, ...] = (
    LibrarySymbol("vLLM", "LogitsProcessor", exports=("Controller",), flags=("--controller-class",), why=_FOR_ALL),
    LibrarySymbol(
        "SGLang", "CustomLogitProcessor", exports=("Controller",), flags=("--controller-class",), why=_FOR_ALL
    ),
    LibrarySymbol("vLLM", "BeamSearchParams, LLM.beam_search", members=("beam_search",)),
    LibrarySymbol("vLLM", "StructuredOutputsParams", ("regex", "json_schema", "choice", "grammar", "constraint")),
    LibrarySymbol(
        "vLLM", "guardrails in front of the server", flags=("--policies",), why="the engine enforces these policies"
    ),
    LibrarySymbol(
        "SGLang", "guardrails in front of the server", flags=("--policies",), why="the engine enforces these policies"
    ),
    LibrarySymbol(
        "TGI", "guardrails in front of the server", flags=("--policies",), why="the engine enforces these policies"
    ),
    LibrarySymbol("SGLang", "gen(regex=), select", ("regex", "choice")),
    LibrarySymbol("SGLang", "fork, join", exports=("Decision.fork",), why="or set `n`"),
    LibrarySymbol(
        "TGI", "grammar.regex, grammar.json", ("regex", "json_schema"), why="TGI's own routes accept `grammar`"
    ),
)

#: Functions that an inferlet of Pie calls, and the equivalents in a controller.
INFERLETS: tuple[LibrarySymbol, ...] = (
    _pie(
        "context.create context.destroy context.model model.load",
        why="a controller belongs to one request, and so to its model",
    ),
    _pie(
        "context.open context.take context.save context.snapshot",
        why="send the text again; the prefix cache keeps its KV",
    ),
    _pie("context.delete", why="the server drops cached KV when it needs the memory"),
    _pie("context.fork", "Decision.fork", "Controller.fork"),
    _pie("context.truncate-working-page-tokens", "Splice", why="a splice rolls back tokens with their KV"),
    _pie("context.suspend", "Decision.wait_for", why="the output keeps its KV while it waits"),
    _pie(
        "context.bid scheduling.price scheduling.rent scheduling.dividend scheduling.balance scheduling.latency",
        why="the scheduler is fair between users; requests have `priority` and `deadline`",
    ),
    _pie(
        "context.tokens-per-page context.committed-page-count context.working-page-count "
        "context.commit-working-pages context.reserve-working-pages context.release-working-pages "
        "context.working-page-token-count",
        why=_ENGINE_OWNS,
    ),
    _pie(
        "forward-pass.execute forward-pass.context",
        "Controller.next",
        why="the engine calls this method between two forward passes",
    ),
    _pie("forward-pass.input-tokens", "Decision.splice", why="only the forced tokens of a splice are computed"),
    _pie(
        "forward-pass.input-speculative-tokens forward-pass.output-speculative-tokens forward-pass.pass-speculation",
        "Branch.draft",
    ),
    _pie("forward-pass.logit-mask", "Branch.mask"),
    _pie("forward-pass.sampler", "Branch.sampling", why="the parameters apply to one sampled token"),
    _pie("forward-pass.adapter", why="a request names one adapter for its whole text, in `adapter`"),
    _pie("forward-pass.attention-mask", why=_ENGINE_OWNS),
    _pie("forward-pass.input-image", why="send images as parts of messages; a controller cannot add images"),
    _pie("forward-pass.input-audio", why="send sounds as parts of messages; a controller cannot add sounds"),
    _pie("sampler.multinomial sampler.top-k sampler.top-p sampler.min-p sampler.top-k-top-p", "Branch.sampling"),
    _pie("sampler.dist sampler.logprob sampler.logprobs", "Branch.top_logprobs", "SequenceView.candidates"),
    _pie(
        "sampler.raw-logits sampler.entropy",
        why="a controller gets the probabilities of some candidates, not all logits",
    ),
    _pie("sampler.embedding", members=("embed",), why="the call embeds whole texts"),
    _pie("grammar.from-json-schema", "JsonSchema"),
    _pie("grammar.json", "JsonObject"),
    _pie("grammar.from-regex", "Regex"),
    _pie("grammar.from-ebnf", "Gbnf", "Lark"),
    _pie("grammar.to-string", "Constraint"),
    _pie(
        "matcher.accept-tokens matcher.next-token-logit-mask matcher.is-terminated matcher.reset",
        "SequenceView.mask_of",
        why="scripts and modules have handles for constraints",
    ),
    _pie("session.send", "SequenceView.store", "SequenceView.log"),
    _pie(
        "session.receive",
        "SequenceView.tool",
        why="for a tool of the client, the stream contains the call, and the client answers with a POST",
    ),
    _pie("session.send-file session.receive-file", why="variables hold bytes; controllers cannot transfer files"),
    _pie(
        "messaging.push messaging.pull messaging.broadcast messaging.subscribe",
        "SequenceView.store",
        why="the forks of one request share variables and can wait for them; requests do not share variables",
    ),
    _pie(
        "runtime.launch",
        "SequenceView.tool",
        why="a controller cannot start another controller; a tool may send a request to the server",
    ),
    _pie(
        "runtime.version runtime.instance-id runtime.username runtime.models",
        why="use /info and /v1/models, which return this information",
    ),
    _pie(
        "tokenizer.encode tokenizer.decode tokenizer.vocabs tokenizer.special-tokens tokenizer.split-regex",
        "SequenceView.encode",
        "SequenceView.vocab_size",
        why="scripts also have `tokenize` and `detokenize`",
    ),
    _pie("adapter.open", why="a request names its adapter in `adapter`"),
    _pie("adapter.load", members=("load_adapter",), flags=("--adapter",)),
    _pie(
        "adapter.create adapter.destroy adapter.fork adapter.save zo.adapter-seed zo.initialize zo.update",
        why="bridle does not train adapters",
    ),
    _pie("image.from-bytes", why="send images as parts of messages (docs/pictures.md)"),
    _pie("video.from-bytes audio.from-bytes", why=MEDIA),
    _pie("speech.generate", why=TEXT),
    _pie(
        "chat.system chat.user chat.assistant chat.cue chat.seal chat.stop-tokens chat.create-decoder",
        members=("chat", "session"),
        why="the chat routes apply chat templates; a controller sees only tokens",
    ),
    _pie("reasoning.create-decoder", why="a chat returns reasoning separately, and `thinking_budget` limits it"),
    _pie(
        "tool-use.equip tool-use.answer tool-use.format tool-use.create-decoder tool-use.create-matcher",
        why="set `tools` in a chat; a constraint makes the calls of strict tools valid",
    ),
    _pie("mcp.connect mcp.call-tool mcp.list-tools mcp.available-servers", "SequenceView.tool", flags=("--tools",)),
    _pie(
        "mcp.list-resources mcp.read-resource mcp.list-prompts mcp.get-prompt",
        why="bridle uses only the tools of MCP servers",
    ),
)
