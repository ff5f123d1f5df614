"""The OpenAI API: completions, chat, responses, embeddings and scores, batch files."""

from bridle.http.openai import chat, completions, embeddings, responses, scores

routers = (completions.router, chat.router, embeddings.router, responses.router, scores.router)
