"""Tests of unmodified third-party clients with a running server; each client is installed in an environment of its
own."""
