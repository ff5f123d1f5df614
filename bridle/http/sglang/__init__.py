"""SGLang's own way to ask for text: its body on `/generate`, beside text-generation-inference's."""
