"""Mathematics problems with short answers, as Harbor tasks and as a stream of single rollouts, trained by SAO."""
