"""An MCP server (Model Context Protocol) with one tool: the time zone of a city.

    python examples/town_server.py

The server communicates over its standard input and output, and its caller starts it. `examples/tools.toml` names this
server, and the agents of `agent.js` and `agent.py` call its tool as `town.zone`. The server needs the package `mcp`
(`pip install 'bridle-llm[tools]'`).
"""

from mcp.server.mcpserver import MCPServer

ZONES = {"Oslo": "Europe/Oslo", "Tokyo": "Asia/Tokyo", "Lima": "America/Lima"}

server = MCPServer("town")


@server.tool()
def zone(city: str) -> str:
    """Return the time zone of a city."""
    if city not in ZONES:
        raise ValueError(f"nothing is known of {city}; known are {', '.join(ZONES)}")
    return ZONES[city]


if __name__ == "__main__":
    server.run()
