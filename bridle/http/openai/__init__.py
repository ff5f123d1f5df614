"""The OpenAI API: completions, chat, responses, embeddings, scores and labels, batch files."""

from bridle.http.openai import chat, classify, completions, embeddings, responses, scores

routers = (
    completions.router,
    chat.router,
    embeddings.router,
    *responses.routers,
    scores.router,
    classify.router,
)
