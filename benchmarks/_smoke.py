import sys, time, torch, traceback
from headwater.engine.engine import Engine
from headwater.config.schema import EngineConfig
from headwater.core.records import *
from headwater.models.load import load_model, load_tokenizer, end_token_ids
for name in ("tiny:qwen3","tiny:qwen2","tiny:llama"):
  for det in (False, True):
    try:
        e=Engine.load(name, EngineConfig(deterministic=det, memory_fraction=0.05), dtype="float32", device="cuda")
        tok=e.tokenizer
        prompts=[tuple(tok.encode(f"What is {i} plus {i*3}? Answer briefly."*(1+i%3))) for i in range(6)]
        reqs=[ModelRequest(f"{i}.{j}", p, SamplingParams(max_new_tokens=40, temperature=0.0), rng_key=i*10+j) for i,p in enumerate(prompts) for j in range(3)]
        out=e.generate(reqs)
        m=load_model(name,dtype="float32",device="cuda",seed=0)
        ok=0
        for r,o in zip(reqs,out):
            ids=torch.tensor([r.input_tokens],device="cuda")
            g=m.generate(ids,attention_mask=torch.ones_like(ids),do_sample=False,max_new_tokens=40,eos_token_id=list(end_token_ids(m,tok)),pad_token_id=0)
            ok+= g[0,ids.shape[1]:].tolist()==list(o.output_tokens)
        # sampled logprobs vs full forward
        reqs=[ModelRequest(f"{i}.{j}", p, SamplingParams(max_new_tokens=40, temperature=0.7), rng_key=i*10+j) for i,p in enumerate(prompts) for j in range(3)]
        out=e.generate(reqs); err=0
        for r,o in zip(reqs,out):
            ids=torch.tensor([r.input_tokens+o.output_tokens],device="cuda")
            with torch.inference_mode(): lp=(m(ids).logits[0].float()/0.7).log_softmax(-1)
            n=len(r.input_tokens); ref=lp[n-1:-1].gather(1,torch.tensor(o.output_tokens,device="cuda")[:,None])[:,0]
            err=max(err,(ref-torch.tensor(o.output_logprobs,device="cuda")).abs().max().item())
        again=e.generate(list(reversed(reqs)))[::-1]
        alone=[e.generate([r])[0] for r in reqs[:3]]
        same=sum(a.output_logprobs==b.output_logprobs for a,b in zip(out,again)); same2=sum(a.output_logprobs==b.output_logprobs for a,b in zip(out,alone))
        print(name,det,"greedy",ok,len(reqs),"logprob err",err,"repeat same",same,"alone same",same2,flush=True)
        e.close()
    except Exception: traceback.print_exc()
