"""The OpenAI API: completions, chat, responses, embeddings, batch files."""

from bridle.http.openai import chat, completions, embeddings, responses

routers = (completions.router, chat.router, embeddings.router, responses.router)
