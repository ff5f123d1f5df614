"""The server process of the HTTP APIs: uvicorn's protocols with limits, TLS, logs, and early refusals."""
