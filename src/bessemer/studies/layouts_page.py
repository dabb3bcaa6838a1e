def page(found): return ""
def table(found): return "\n".join(f"{r['layout']:<20}{r['case']:<7}{r['precision']:<6}{r.get('loss',-1):.2e} {r.get('weight',-1):.2e} {r.get('seconds',0):.3f} {r.get('sent')} {r.get('why','')}" for r in found["rows"])
