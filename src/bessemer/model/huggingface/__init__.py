"""To and from the Hugging Face layout. One table of names and one of views serve both ways; the gate holds every export
against `transformers`."""
