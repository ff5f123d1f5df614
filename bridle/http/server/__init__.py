"""The server process of the HTTP APIs: uvicorn's protocols with bounds, TLS, logs, early refusals."""
