"""SGLang's own route for text: its body on `/generate`, which also takes text-generation-inference's."""
