"""SGLang's own route for text, `/generate`. The route also accepts bodies of text-generation-inference."""
