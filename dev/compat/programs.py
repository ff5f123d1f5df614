"""Programs that steer or guard texts in other systems, and the equivalent controllers or policies in bridle: logits
processors, guardrails, and the functions that an inferlet of Pie calls."""

from __future__ import annotations

from bridle.compat.schema import LibrarySymbol
from bridle.compat.vendor_fields import TEXT

#: The way to send files other than images.
MEDIA = "sounds and videos are parts of messages: `docs/sound-and-video.md`"
_FOR_ALL = "a policy of the kind `python` holds it on all requests"
_ENGINE_OWNS = "the engine owns passes, pages and their order; limits hold for all"


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
    LibrarySymbol("vLLM", "guardrails in front of the server", flags=("--policies",), why="they hold in the engine"),
    LibrarySymbol("SGLang", "guardrails in front of the server", flags=("--policies",), why="they hold in the engine"),
    LibrarySymbol("TGI", "guardrails in front of the server", flags=("--policies",), why="they hold in the engine"),
    LibrarySymbol("SGLang", "gen(regex=), select", ("regex", "choice")),
    LibrarySymbol("SGLang", "fork, join", exports=("Decision.fork",), why="or `n`"),
    LibrarySymbol("TGI", "grammar.regex, grammar.json", ("regex", "json_schema"), why="`grammar` on its own routes"),
)

#: Functions that an inferlet of Pie calls, and the equivalents in a controller.
INFERLETS: tuple[LibrarySymbol, ...] = (
    _pie("context.create context.destroy context.model model.load", why="a controller belongs to one request"),
    _pie("context.open context.take context.save context.snapshot", why="send the text again: its KV is found"),
    _pie("context.delete", why="cached KV is dropped when memory is needed"),
    _pie("context.fork", "Decision.fork", "Controller.fork"),
    _pie("context.truncate-working-page-tokens", "Splice", why="a splice takes tokens back, with their KV"),
    _pie("context.suspend", "Decision.wait_for", why="the KV waits with the output"),
    _pie(
        "context.bid scheduling.price scheduling.rent scheduling.dividend scheduling.balance scheduling.latency",
        why="users take turns, requests have `priority` and `deadline`",
    ),
    _pie(
        "context.tokens-per-page context.committed-page-count context.working-page-count "
        "context.commit-working-pages context.reserve-working-pages context.release-working-pages "
        "context.working-page-token-count",
        why=_ENGINE_OWNS,
    ),
    _pie("forward-pass.execute forward-pass.context", "Controller.next", why="called between two passes"),
    _pie("forward-pass.input-tokens", "Decision.splice", why="forced tokens; only they are computed"),
    _pie(
        "forward-pass.input-speculative-tokens forward-pass.output-speculative-tokens forward-pass.pass-speculation",
        "Branch.draft",
    ),
    _pie("forward-pass.logit-mask", "Branch.mask"),
    _pie("forward-pass.sampler", "Branch.sampling", why="for one draw"),
    _pie("forward-pass.adapter", why="a request names its `adapter`; it is the same for the whole text"),
    _pie("forward-pass.attention-mask", why=_ENGINE_OWNS),
    _pie("forward-pass.input-image", why="images are parts of messages; a controller adds none"),
    _pie("forward-pass.input-audio", why="sounds are parts of messages; a controller adds none"),
    _pie("sampler.multinomial sampler.top-k sampler.top-p sampler.min-p sampler.top-k-top-p", "Branch.sampling"),
    _pie("sampler.dist sampler.logprob sampler.logprobs", "Branch.top_logprobs", "SequenceView.candidates"),
    _pie("sampler.raw-logits sampler.entropy", why="candidates come with probabilities, not the whole row"),
    _pie("sampler.embedding", members=("embed",), why="for whole texts"),
    _pie("grammar.from-json-schema", "JsonSchema"),
    _pie("grammar.json", "JsonObject"),
    _pie("grammar.from-regex", "Regex"),
    _pie("grammar.from-ebnf", "Gbnf", "Lark"),
    _pie("grammar.to-string", "Constraint"),
    _pie(
        "matcher.accept-tokens matcher.next-token-logit-mask matcher.is-terminated matcher.reset",
        "SequenceView.mask_of",
        why="scripts and modules have handles of constraints",
    ),
    _pie("session.send", "SequenceView.store", "SequenceView.log"),
    _pie("session.receive", "SequenceView.tool", why="a tool of the client: its stream has the call, a POST answers"),
    _pie("session.send-file session.receive-file", why="variables hold bytes; files stay outside"),
    _pie(
        "messaging.push messaging.pull messaging.broadcast messaging.subscribe",
        "SequenceView.store",
        why="variables, which the forks of a request share and can wait for; none beyond it",
    ),
    _pie("runtime.launch", "SequenceView.tool", why="a program starts no other; a tool may ask the server"),
    _pie("runtime.version runtime.instance-id runtime.username runtime.models", why="/info and /v1/models say this"),
    _pie(
        "tokenizer.encode tokenizer.decode tokenizer.vocabs tokenizer.special-tokens tokenizer.split-regex",
        "SequenceView.encode",
        "SequenceView.vocab_size",
        why="scripts have `tokenize` and `detokenize`, too",
    ),
    _pie("adapter.open", why="a request names its `adapter`"),
    _pie("adapter.load", members=("load_adapter",), flags=("--adapter",)),
    _pie(
        "adapter.create adapter.destroy adapter.fork adapter.save zo.adapter-seed zo.initialize zo.update",
        why="nothing is trained here",
    ),
    _pie("image.from-bytes", why="images are parts of messages: `docs/pictures.md`"),
    _pie("video.from-bytes audio.from-bytes", why=MEDIA),
    _pie("speech.generate", why=TEXT),
    _pie(
        "chat.system chat.user chat.assistant chat.cue chat.seal chat.stop-tokens chat.create-decoder",
        members=("chat", "session"),
        why="the chat routes render and read templates; a controller sees tokens",
    ),
    _pie("reasoning.create-decoder", why="chats return reasoning separately, within `thinking_budget`"),
    _pie(
        "tool-use.equip tool-use.answer tool-use.format tool-use.create-decoder tool-use.create-matcher",
        why="chats take `tools`; strict ones are valid by constraint",
    ),
    _pie("mcp.connect mcp.call-tool mcp.list-tools mcp.available-servers", "SequenceView.tool", flags=("--tools",)),
    _pie("mcp.list-resources mcp.read-resource mcp.list-prompts mcp.get-prompt", why="tools alone are offered"),
)
