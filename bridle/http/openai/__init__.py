"""The OpenAI API: completions, chat, responses, decisions, embeddings, scores and labels, batch files."""

from bridle.http.openai import batches, chat, classify, completions, decide, embeddings, responses, scores

routers = (
    completions.router,
    chat.router,
    decide.router,
    embeddings.router,
    *responses.routers,
    *batches.routers,
    scores.router,
    classify.router,
)
