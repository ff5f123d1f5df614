"""The agents: the installation, configuration and start of each, and its requirements of a server.

In files, variables and commands, `{url}` is the server's address, `{model}` the model's name, and `{bin}` the folder of
the client's programs. `{home}` is the client's home folder, and `{task}` its task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

READ = "Read hello.txt with a tool, and tell me the password in it"
_MODELS_OF_PI = """{{"providers": {{"bridle": {{"baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "none",
 "models": [{{"id": "{model}", "contextWindow": 32000, "maxTokens": 400}}]}}}}}}"""
_OPENCODE = """{{"autoupdate": false, "share": "disabled", "model": "bridle/{model}", "small_model": "bridle/{model}",
 "provider": {{"bridle": {{"npm": "@ai-sdk/openai-compatible", "options": {{"baseURL": "{url}/v1", "apiKey": "none",
 "timeout": false}}, "models": {{"{model}": {{"limit": {{"context": 32000, "output": 400}}}}}}}}}}}}"""
_CLINE = """{{"version": 1, "lastUsedProvider": "openai-compatible", "modes": {{}}, "providers": {{"openai-compatible":
 {{"settings": {{"provider": "openai-compatible", "apiKey": "none", "model": "{model}", "baseUrl": "{url}/v1"}},
 "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}}}}}}"""
_LLM = """- model_id: {model}
  model_name: {model}
  api_base: {url}/v1
  supports_tools: true
"""
_FUNCTION = """def read_file(path: str) -> str:
    "Return the contents of a text file."
    return open(path).read()
"""
_QWEN = """{{"modelProviders": {{"openai": [{{"id": "{model}", "name": "bridle", "baseUrl": "{url}/v1", "envKey":
 "BRIDLE_KEY", "generationConfig": {{"contextWindowSize": 32000, "timeout": 1800000,
 "samplingParams": {{"max_tokens": 400}}}}}}]}},
 "security": {{"auth": {{"selectedType": "openai"}}}}, "model": {{"name": "{model}"}},
 "general": {{"enableAutoUpdate": false}}, "privacy": {{"usageStatisticsEnabled": false}}}}"""
_CODEX = """model = "{model}"
model_provider = "bridle"
[model_providers.bridle]
name = "bridle"
base_url = "{url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = 1200000
"""


def _call(name: str, arguments: str) -> str:
    """Return the text with which a model calls the tool `name`."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client. `packages` are packages of npm, or of PyPI if `is_python`. `says` is the first answer of a model that
    knows the client's tools. `has_tools` means that the client offers tools and sends their results."""

    name: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    says: str
    is_python: bool = False
    has_tools: bool = True
    task: str = READ
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str:
        """The file name of the client's program."""
        return self.command[0].removeprefix("{bin}/")


_OPENAI = {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

# fmt: off
CLIENTS = (
    Client(
        name="claude-code",
        packages=("@anthropic-ai/claude-code@2.1.328",),
        command=("{bin}/claude", "-p", "{task}", "--output-format", "json", "--allowedTools", "Bash", "Read",
                 "--max-turns", "4"),
        variables={
            "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_SMALL_FAST_MODEL": "{model}", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1", "API_TIMEOUT_MS": "1800000",
        },
        says=_call("Bash", '{"command": "cat hello.txt"}'),
    ),
    Client(
        name="pi",
        packages=("@mariozechner/pi-coding-agent@0.73.1",),
        command=("{bin}/pi", "-p", "--offline", "--provider", "bridle", "--model", "{model}", "{task}"),
        files={"{home}/.pi/agent/models.json": _MODELS_OF_PI},
        says=_call("read", '{"path": "hello.txt"}'),
    ),
    Client(
        name="opencode",
        packages=("opencode-ai@1.18.33",),
        command=("{bin}/opencode", "run", "--auto", "--title", "t", "{task}"),
        files={"{home}/.config/opencode/opencode.json": _OPENCODE},
        variables={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        says=_call("bash", '{"command": "cat hello.txt", "description": "Print the file"}'),
    ),
    Client(
        name="cline",
        packages=("cline@3.0.65",),
        command=("{bin}/cline", "-P", "openai-compatible", "-m", "{model}", "-k", "none", "--auto-approve", "true",
                 "--retries", "1", "{task}"),
        files={"{home}/.cline/data/settings/providers.json": _CLINE},
        variables={"CLINE_SESSION_BACKEND_MODE": "local"},
        says=_call("run_commands", '{"commands": ["cat hello.txt"]}'),
    ),
    Client(
        name="qwen-code",
        packages=("@qwen-code/qwen-code@0.15.10",),
        command=("{bin}/qwen", "--yolo", "{task}"),
        files={"{home}/.qwen/settings.json": _QWEN},
        variables={"BRIDLE_KEY": "none", "QWEN_TELEMETRY_ENABLED": "false"},
        says=_call("run_shell_command", '{"command": "cat hello.txt", "is_background": false}'),
    ),
    Client(
        name="codex",
        packages=("@openai/codex@0.169.0",),
        command=("{bin}/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
                 "{task}"),
        files={"{home}/.codex/config.toml": _CODEX},
        says=_call("exec_command", '{"cmd": "cat hello.txt"}'),
    ),
    Client(
        name="llm",
        packages=("llm",),
        is_python=True,
        command=("{bin}/llm", "-m", "{model}", "--key", "none", "--functions", _FUNCTION, "{task}"),
        files={"{home}/llm/extra-openai-models.yaml": _LLM},
        variables={"LLM_USER_PATH": "{home}/llm"},
        says=_call("read_file", '{"path": "hello.txt"}'),
    ),
    Client(
        name="aider",
        packages=("aider-chat==0.86.2",),
        is_python=True,
        has_tools=False,
        command=("{bin}/aider", "--model", "openai/{model}", "--yes-always", "--no-git", "--no-check-update",
                 "--no-show-model-warnings", "--no-analytics", "--no-gitignore", "--no-pretty", "--timeout", "1800",
                 "--message", "{task}", "hello.txt"),
        task="Replace violet by green in hello.txt",
        variables=_OPENAI,
        says="hello.txt\n```\nThe password is green-42.\n```",
    ),
    Client(
        name="mini-swe-agent",
        packages=("mini-swe-agent==2.4.6", "mcp"),
        is_python=True,
        command=("{bin}/mini", "-m", "openai/{model}", "-t", "{task}", "-y", "--exit-immediately", "-c", "mini.yaml",
                 "-c", "agent.step_limit=4", "-o", "{home}/trajectory.json"),
        variables=_OPENAI | {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true",
                             "MSWEA_GLOBAL_CONFIG_DIR": "{home}/mini"},
        says=_call("bash", '{"command": "cat hello.txt"}'),
    ),
)
# fmt: on
