// Sampling settings as the wire spells them.
import type { CreateFrame } from "../wire/frames";
import type { Sampling } from "./settings";

type Fields = Pick<CreateFrame, "n" | "beam_width" | "stream_beams" | "temperature" | "top_p" | "max_output_tokens" | "seed">;

export function requestFields(settings: Sampling): Fields {
  const common: Fields = {
    ...(settings.n > 1 ? { n: settings.n } : {}),
    ...(settings.maxTokens > 0 ? { max_output_tokens: settings.maxTokens } : {}),
  };
  if (settings.search === "beam") return { ...common, beam_width: Math.max(2, settings.n), stream_beams: true };
  return {
    ...common,
    temperature: settings.temperature,
    top_p: settings.topP,
    ...(settings.seed !== null ? { seed: settings.seed } : {}),
  };
}
