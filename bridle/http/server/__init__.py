"""The server process of the HTTP APIs: uvicorn's protocols with additional limits, TLS, logs, and early refusals."""
